import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from onnxport.errors import CapacityError
from onnxport.kv.host_tier import HostTier


def test_the_least_recently_used_leave_first() -> None:
    tier = HostTier(10)
    assert tier.put(b"a", b"aaaa") == []
    assert tier.put(b"b", b"bbb") == []
    assert tier.put(b"c", b"ccc") == []
    assert tier.get(b"a") == b"aaaa"
    assert tier.put(b"d", b"dddd") == [(b"b", b"bbb"), (b"c", b"ccc")]
    assert list(tier.items()) == [(b"a", b"aaaa"), (b"d", b"dddd")]
    assert list(tier.recent_items()) == [(b"d", b"dddd"), (b"a", b"aaaa")]
    assert (tier.num_bytes, len(tier)) == (8, 2)


def test_looking_is_not_using() -> None:
    tier = HostTier(2)
    tier.put(b"a", b"1")
    tier.put(b"b", b"2")
    assert b"a" in tier
    assert dict(tier.items()) == dict(tier.recent_items()) == {b"a": b"1", b"b": b"2"}
    assert tier.get(b"z") is None
    assert tier.put(b"c", b"3") == [(b"a", b"1")]
    assert b"a" not in tier


def test_what_is_larger_than_the_tier_goes_straight_on() -> None:
    tier = HostTier(4)
    tier.put(b"a", b"1234")
    assert tier.put(b"b", b"12345") == [(b"b", b"12345")]
    assert list(tier.items()) == [(b"a", b"1234")]
    assert HostTier(0).put(b"a", b"1") == [(b"a", b"1")]


def test_a_key_has_one_content() -> None:
    tier = HostTier(6)
    tier.put(b"a", b"11")
    tier.put(b"b", b"22")
    assert tier.put(b"a", b"333") == []
    assert list(tier.items()) == [(b"b", b"22"), (b"a", b"333")]
    assert tier.num_bytes == 5


def test_an_empty_content_is_one() -> None:
    tier = HostTier(1)
    tier.put(b"a", b"")
    assert tier.get(b"a") == b""
    tier.discard(b"a")
    assert tier.get(b"a") is None


def test_discard_and_clear() -> None:
    tier = HostTier(9)
    for key in (b"a", b"b", b"c"):
        tier.put(key, key * 2)
    tier.discard(b"b")
    tier.discard(b"b")
    assert [key for key, _ in tier.items()] == [b"a", b"c"]
    assert tier.num_bytes == 4
    tier.clear()
    assert (len(tier), tier.num_bytes, list(tier.items())) == (0, 0, [])


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(CapacityError, match="-1 bytes"):
        HostTier(-1)


KEYS = st.integers(0, 6).map(lambda i: bytes([i]))


class HostMachine(RuleBasedStateMachine):
    """A tier beside a list of pairs, the least recently used first."""

    @initialize(capacity=st.integers(0, 20))
    def start(self, capacity: int) -> None:
        self.tier = HostTier(capacity)
        self.pairs: list[tuple[bytes, bytes]] = []

    @rule(key=KEYS, size=st.integers(0, 24))
    def put(self, key: bytes, size: int) -> None:
        content = key * size
        self.pairs = [pair for pair in self.pairs if pair[0] != key]
        expected = []
        if size > self.tier.capacity_bytes:
            expected.append((key, content))
        else:
            self.pairs.append((key, content))
        while sum(len(content) for _, content in self.pairs) > self.tier.capacity_bytes:
            expected.append(self.pairs.pop(0))
        assert self.tier.put(key, content) == expected

    @rule(key=KEYS)
    def get(self, key: bytes) -> None:
        found = [pair for pair in self.pairs if pair[0] == key]
        assert self.tier.get(key) == (found[0][1] if found else None)
        self.pairs = [pair for pair in self.pairs if pair[0] != key] + found

    @rule(key=KEYS)
    def discard(self, key: bytes) -> None:
        self.tier.discard(key)
        self.pairs = [pair for pair in self.pairs if pair[0] != key]

    @invariant()
    def same(self) -> None:
        assert list(self.tier.items()) == self.pairs
        assert self.tier.num_bytes == sum(len(content) for _, content in self.pairs)
        assert self.tier.num_bytes <= self.tier.capacity_bytes
        assert len(self.tier) == len(self.pairs)


TestHostMachine = HostMachine.TestCase
