"""Content keys, checked against hashlib alone."""

import hashlib
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxport.kv.prefix import Branch, KeyChain, root_key, unit_tokens


def chain(tokens: Sequence[int], block_size: int = 4, root: bytes | None = None) -> KeyChain:
    made = KeyChain(root or root_key(), block_size)
    made.extend(array("q", tokens))
    return made


def all_keys(made: KeyChain) -> list[bytes]:
    return [made.key(index) for index in range(len(made))]


@given(
    st.lists(st.integers(0, 99), max_size=70),
    st.sampled_from([3, 4, 16, 32, 48]),
    st.sampled_from([3, 4, 16, 32, 48]),
)
def test_blocks_of_another_size_have_the_keys_that_they_always_had(
    tokens: list[int], before: int, after: int
) -> None:
    made = chain(tokens, before)
    other = made.for_block_size(after)
    kept = unit_tokens(before) == unit_tokens(after)
    assert all_keys(other) == (all_keys(chain(tokens, after)) if kept else [])
    more = [*tokens, *range(64)]
    other.extend(array("q", more))
    assert all_keys(other) == all_keys(chain(more, after))
    assert all_keys(made) == all_keys(chain(tokens, before))


def expected_units(tokens: Sequence[int], unit: int, root: bytes) -> list[bytes]:
    """The definition, written another way: SHA-256(parent, tokens as little-endian int64)."""
    found, parent = [], root
    for start in range(0, len(tokens) - unit + 1, unit):
        data = b"".join(token.to_bytes(8, "little") for token in tokens[start : start + unit])
        parent = hashlib.sha256(parent + data).digest()
        found.append(parent)
    return found


@given(
    st.lists(st.integers(0, 99), max_size=70),
    st.integers(1, 70),
    st.sampled_from([3, 4, 16, 32]),
    st.integers(0, 70),
)
def test_a_branch_has_other_keys_from_its_unit_on(
    tokens: list[int], start: int, block_size: int, cut: int
) -> None:
    unit, branch = unit_tokens(block_size), Branch.of("a", start)
    plain = expected_units(tokens, unit, root_key())
    before = plain[: start // unit]
    parent = hashlib.sha256((before[-1] if before else root_key()) + branch.name).digest()
    expected = [*before, *expected_units(tokens[len(before) * unit :], unit, parent)]
    made = KeyChain(root_key(), block_size, branch)
    made.extend(array("q", tokens[:cut]))
    for grown in (made, made.copy(), made.first(cut // 2), made.for_block_size(block_size)):
        grown.extend(array("q", tokens))
        units = block_size // unit
        assert all_keys(grown) == expected[units - 1 :: units]
    changed = [one != other for one, other in zip(expected, plain, strict=True)]
    assert changed == [index >= start // unit for index in range(len(plain))]


def test_a_branch_is_named_by_its_adapter_and_its_place() -> None:
    names = {Branch.of(name, start).name for name in ("a", "b", "a1") for start in (1, 11, 111)}
    assert len(names) == 9
    assert root_key("a") not in names


def test_the_root_is_a_hash_of_both_names() -> None:
    assert root_key() == hashlib.sha256(b'["onnxport", null, null]').digest()
    assert root_key("a", "b") == hashlib.sha256(b'["onnxport", "a", "b"]').digest()
    names = [None, "", "a", "b", 'a", "b', "null"]
    roots = {root_key(adapter, salt) for adapter in names for salt in names}
    assert len(roots) == len(names) ** 2


def test_a_known_vector() -> None:
    """A key may be in a file that an older server wrote: it must never change."""
    made = chain(range(16), block_size=16)
    assert made.key(0).hex() == (
        hashlib.sha256(
            hashlib.sha256(b'["onnxport", null, null]').digest()
            + b"".join(bytes([token, 0, 0, 0, 0, 0, 0, 0]) for token in range(16))
        ).hexdigest()
    )
    assert made.key(0).hex() == KNOWN


KNOWN = "51b387662fb3280462f15376dae64c25bee916fcd1c0686f38607d85b95b2e91"


@pytest.mark.parametrize(
    ("block_size", "unit"), [(16, 16), (32, 16), (256, 16), (4, 4), (24, 24), (1, 1)]
)
def test_units_of_block_sizes(block_size: int, unit: int) -> None:
    assert unit_tokens(block_size) == unit
    tokens = [(37 * i) % 1000 for i in range(2 * block_size + unit)]
    units = expected_units(tokens, unit, root_key())
    made = chain(tokens, block_size)
    per_block = block_size // unit
    assert len(made) == len(units) // per_block
    for index in range(len(made)):
        expected = units[index * per_block : (index + 1) * per_block]
        assert made.block(index) == tuple(expected)
        assert made.key(index) == expected[-1]


def test_block_sizes_have_the_keys_of_units_in_common() -> None:
    tokens = list(range(64))
    small, large = chain(tokens, 16), chain(tokens, 32)
    assert [small.block(i)[0] for i in range(4)] == [*large.block(0), *large.block(1)]
    assert small.key(1) == large.key(0)


def test_a_key_depends_on_every_token_before_its_end_and_on_none_after() -> None:
    tokens = list(range(100, 116))
    keys = all_keys(chain(tokens))
    for index in range(16):
        changed = all_keys(chain([*tokens[:index], 7, *tokens[index + 1 :]]))
        same = [a == b for a, b in zip(keys, changed, strict=True)]
        assert same == [block < index // 4 for block in range(4)]


def test_a_key_depends_on_the_root() -> None:
    keys = {chain([1, 2, 3, 4], root=root_key("a", salt)).key(0) for salt in (None, "x", "y")}
    assert len(keys) == 3


def test_only_whole_blocks_have_keys() -> None:
    assert [len(chain(range(count))) for count in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    assert len(chain(range(48), block_size=32)) == 1
    with pytest.raises(IndexError):
        chain(range(7)).key(1)


@given(st.lists(st.integers(0, 2**40), max_size=40), st.data())
def test_growing_in_pieces_gives_the_same_keys(tokens: list[int], data: st.DataObject) -> None:
    made = KeyChain(root_key(), 4)
    length = 0
    while length < len(tokens):
        length = data.draw(st.integers(length + 1, len(tokens)))
        made.extend(array("q", tokens[:length]))
    assert all_keys(made) == expected_units(tokens, 4, root_key())


def test_a_copy_grows_alone() -> None:
    one = chain([1, 2, 3, 4, 5])
    other = one.copy()
    other.extend(array("q", [1, 2, 3, 4, 5, 6, 7, 8]))
    assert (len(one), len(other)) == (1, 2)
    one.extend(array("q", [1, 2, 3, 4, 9, 9, 9, 9]))
    assert one.key(0) == other.key(0)
    assert one.key(1) != other.key(1)
    assert all_keys(other) == all_keys(chain(range(1, 9)))


@pytest.mark.parametrize("block_size", [3, 4, 16, 32, 48])
@pytest.mark.parametrize("count", [0, 1, 3, 15, 16, 47, 48, 60])
def test_the_chain_of_a_beginning(block_size: int, count: int) -> None:
    tokens = list(range(60))
    made = chain(tokens, block_size)
    first = made.first(count)
    assert all_keys(first) == all_keys(chain(tokens[:count], block_size))
    other = [*tokens[:count], *range(100, 160)]
    first.extend(array("q", other))
    assert all_keys(first) == all_keys(chain(other, block_size))
    assert all_keys(made) == all_keys(chain(tokens, block_size))
