"""A caller has one tag under the same keys, and another one as soon as other keys seal."""

from gateway.config import InForce
from gateway.seal.caller_tags import CallerTags
from gateway.seal.keyring import Keys


def test_a_tag_follows_from_the_caller_and_the_key_that_seals() -> None:
    keys = InForce(Keys((b"a" * 32,)))
    tags, other = CallerTags(keys), CallerTags(InForce(Keys((b"a" * 32, b"b" * 32))))
    ann = tags.of(b"ann")
    assert ann == tags.of(b"ann") == other.of(b"ann")
    assert ann != tags.of(b"bob")
    assert len(ann) == 8
    keys.replace(Keys((b"b" * 32, b"a" * 32)))
    assert tags.of(b"ann") != ann
