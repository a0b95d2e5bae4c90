from gateway.runtime.newest import Newest


def test_what_was_set_longest_ago_makes_room() -> None:
    newest: Newest[str, int] = Newest(2)
    assert [newest.keep(key, number) for number, key in enumerate("abc")] == [None, None, 0]
    assert list(newest) == ["b", "c"]


def test_what_is_set_again_is_the_newest_and_needs_no_room() -> None:
    newest: Newest[str, int] = Newest(2)
    assert [newest.keep(key, number) for number, key in enumerate("abac")] == [None, None, None, 1]
    assert newest == {"a": 2, "c": 3}
