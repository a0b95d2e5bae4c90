"""What is done about calls that no process reads."""

from gateway.parking.orphans import must_not_be_cancelled


def test_the_task_ids_of_the_python_sdk_forbid_a_cancellation() -> None:
    assert must_not_be_cancelled("63133a589d9b4531a0a872529ca27d4b:dc71a5c1-3d08-43bc-987c-4c9632ada55d")
    assert not must_not_be_cancelled("63133a589d9b4531a0a872529ca27d4b")
    assert not must_not_be_cancelled("dc71a5c1-3d08-43bc-987c-4c9632ada55d")
