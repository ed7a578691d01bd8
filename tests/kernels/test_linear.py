"""onnxport.CausalConv and GatedDeltaNet: right, the same bits however a sequence is computed."""

from __future__ import annotations

import ctypes
import itertools
import os
import platform
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from onnxport.providers.cpu.library import matmul_isa
from tests.kernels import linear_cases, matmul_cases, matmul_standalone
from tests.kernels.linear_cases import SLOTS, Case, Slots
from tests.kernels.test_neon import COMPILER, EMULATOR, ON_ARM
from tests.kernels.test_sanitized import runtime
from tests.tiers import every

NUM_CASES = 60
GROUPS = 6
WHOLE = (37, 600)  # tokens; more than are made ready at once


def conv_case(lengths: tuple[int, ...] = (3, 1, 4), channels: int = 70) -> linear_cases.ConvCase:
    return linear_cases.make_conv(1, channels, 4, lengths)


def delta_case(lengths: tuple[int, ...] = (3, 1, 4)) -> linear_cases.DeltaCase:
    return linear_cases.make_delta(2, (2, 4), (20, 7), lengths)


@pytest.mark.parametrize("first", every(GROUPS, range(GROUPS)))
def test_random_cases(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str], first: int
) -> None:
    for seed in range(first, NUM_CASES, GROUPS):
        for case in (linear_cases.random_conv(seed), linear_cases.random_delta(seed)):
            for isa in available_isas:
                assert library.onnxport_cpu_set_isa(isa.encode())
                linear_cases.check(case, linear_cases.run(library_path, case))


def parts_of(case: Case) -> list[tuple[list[tuple[int, int]], list[int]]]:
    """Ways to cut the sequence 1 of a case, and the slots that its states are in between.

    It goes from one to another of two slots, or stays in one, which is read and written.
    """
    begin, end = case.slots.ends[1:3]
    made = []
    for cuts in ([], [1], [5, 6, 20], [16, 32, 512], list(range(1, 12))):
        edges = [begin, *(begin + cut for cut in cuts if begin + cut < end), end]
        ranges = list(itertools.pairwise(edges))
        for used in (2, 1):
            slots = [1 + i % used for i in range(len(ranges))]
            made.append((ranges, [case.slots.reads[1], *slots]))
    return made


@pytest.mark.parametrize(
    "case",
    [
        linear_cases.make_conv(4, 70, 4, WHOLE),
        linear_cases.make_delta(4, (2, 4), (128, 35), WHOLE),
        linear_cases.make_delta(5, (1, 2), (37, 9), WHOLE),
        linear_cases.make_channels(4, (2, 4), (128, 35), WHOLE),
        linear_cases.make_channels(5, (1, 2), (37, 9), WHOLE),
        linear_cases.make_gated(4, (2, 4), (128, 35), WHOLE),
        linear_cases.make_gated(5, (1, 2), (37, 9), WHOLE),
        linear_cases.make_steps(6, (1, 2), (16, 12), WHOLE),
    ],
    ids=[
        *("convolution", "delta", "delta of odd sizes", "channels", "channels of odd sizes"),
        *("gated", "gated of odd sizes", "steps"),
    ],
)
def test_a_sequence_has_the_same_bits_however_it_is_computed(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str], case: Case
) -> None:
    """Alone or beside another, whole or in chunks, on any number of threads."""
    begin, end = case.slots.ends[1:3]
    for isa in available_isas:
        assert library.onnxport_cpu_set_isa(isa.encode())
        session = matmul_cases.session(library_path, linear_cases.model(case))
        single = matmul_cases.session(library_path, linear_cases.model(case), threads=1)
        whole, pool = linear_cases.run_session(session, case.feeds(), case.pool)
        linear_cases.check(case, (whole, pool))
        final = pool[case.slots.writes[1]]
        for threads in (session, single):
            again = linear_cases.run_session(threads, case.feeds(), case.pool)
            assert again[0].tobytes() == whole.tobytes(), isa
            assert again[1].tobytes() == pool.tobytes(), isa
        for ranges, slots in parts_of(case):
            # States go from slot to slot; the ones that are read stay.
            states = case.pool.copy()
            if slots[0]:
                states[SLOTS - 1] = case.pool[slots[0]]
                slots[0] = SLOTS - 1
            parts = []
            for (first, last), read, write in zip(ranges, slots, slots[1:], strict=False):
                chosen = Slots((last - first,), (read,), (write,))
                part = case.tokens(list(range(first, last)), chosen, states)
                output, states = linear_cases.run_session(session, part.feeds(), states)
                parts.append(output)
            assert np.concatenate(parts).tobytes() == whole[begin:end].tobytes(), (isa, ranges)
            assert states[slots[-1]].tobytes() == final.tobytes(), (isa, ranges)


@pytest.mark.parametrize("case", [conv_case(), delta_case()], ids=["convolution", "delta"])
def test_a_pool_that_is_not_bound_in_place_is_copied(library_path: Path, case: Case) -> None:
    wanted = linear_cases.run(library_path, case)
    session = matmul_cases.session(library_path, linear_cases.model(case))
    given = case.pool.copy()
    found = session.run(["y", "new_pool"], {**case.feeds(), "pool": given})
    assert given.tobytes() == case.pool.tobytes()
    for one, other in zip(found, wanted, strict=True):
        assert one.tobytes() == other.tobytes()


def test_what_is_not_a_number_stays_in_its_sequence(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str]
) -> None:
    conv, delta = conv_case(), delta_case()
    spoiled = conv.x.copy(), delta.value.copy()
    for values in spoiled:
        values[1] = np.nan  # of the first sequence
    for case, other in (
        (conv, conv.replace(x=spoiled[0])),
        (delta, delta.replace(value=spoiled[1])),
    ):
        for isa in available_isas:
            assert library.onnxport_cpu_set_isa(isa.encode())
            plain, found = (linear_cases.run(library_path, one) for one in (case, other))
            assert np.isnan(found[0][1:3]).all()
            assert found[0][0].tobytes() == plain[0][0].tobytes()
            assert found[0][3:].tobytes() == plain[0][3:].tobytes()
            assert np.isnan(found[1][case.slots.writes[0]]).any()
            for write in case.slots.writes[1:]:
                assert found[1][write].tobytes() == plain[1][write].tobytes()


def test_concurrent_sessions(library_path: Path) -> None:
    cases = [*map(linear_cases.random_conv, range(4)), *map(linear_cases.random_delta, range(4))]
    sessions = [matmul_cases.session(library_path, linear_cases.model(case)) for case in cases]

    def output(i: int) -> bytes:
        return linear_cases.run_session(sessions[i], cases[i].feeds(), cases[i].pool)[0].tobytes()

    alone = [output(i) for i in range(len(cases))]
    with ThreadPoolExecutor(4) as executor:
        for _ in range(5):
            assert list(executor.map(output, range(len(cases)))) == alone


@pytest.mark.parametrize("case", [conv_case(), delta_case()], ids=["convolution", "delta"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reads": (0, -1, 0)}, r"state_reads\[1\] must be in \[0, 9\), found -1"),
        ({"reads": (0, 9, 0)}, r"state_reads\[1\] must be in \[0, 9\), found 9"),
        ({"writes": (1, 2, 0)}, r"state_writes\[2\] must be in \[1, 9\), found 0"),
        ({"writes": (1, 2, 9)}, r"state_writes\[2\] must be in \[1, 9\), found 9"),
        ({"writes": (1, 2, 1)}, r"state_writes\[2\] is 1, which another sequence writes, too"),
        ({"reads": (0, 3, 0)}, r"state_reads\[1\] is 3, which another sequence of the step writes"),
        ({"lengths": (3, -1, 6)}, "cumulative_sequence_length must not decrease, found 2 after 3"),
        ({"lengths": (3, 1, 5)}, "must end with the number of tokens 8, found 9"),
        ({"reads": (0, 0)}, r"cumulative_sequence_length must have the shape \(3\), found \(4\)"),
        ({"writes": (1, 2)}, r"state_writes must have the shape \(3\), found \(2\)"),
    ],
)
def test_wrong_slots_are_refused(
    library_path: Path, case: Case, changes: dict[str, tuple[int, ...]], message: str
) -> None:
    fields = {"lengths": (3, 1, 4), "reads": (0, 4, 0), "writes": (1, 2, 3), **changes}
    wrong = case.replace(slots=Slots(**fields))
    session = matmul_cases.session(library_path, linear_cases.model(wrong))
    with pytest.raises(Exception, match=f"onnxport CPU kernel: .*{message}"):
        linear_cases.run_session(session, wrong.feeds(), case.pool)


def test_lengths_begin_with_0(library_path: Path) -> None:
    case = conv_case()
    session = matmul_cases.session(library_path, linear_cases.model(case))
    feeds = case.feeds() | {"lengths": np.array([1, 3, 4, 8], np.int32)}
    with pytest.raises(Exception, match="must begin with 0, found 1"):
        linear_cases.run_session(session, feeds, case.pool)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"channels": 0}, "channels must be 1 to 2147483647, found 0"),
        ({"taps": 1}, "taps must be 2 to 8, found 1"),
        ({"taps": 9}, "taps must be 2 to 8, found 9"),
        ({"channels": 71}, "weight must have 284 elements, found 280"),
        ({"activation": "gelu"}, "activation must be none or silu, found gelu"),
    ],
)
def test_convolutions_that_are_refused(
    library_path: Path, attributes: dict[str, object], message: str
) -> None:
    with pytest.raises(Exception, match=f"CausalConv: {message}"):
        matmul_cases.session(library_path, linear_cases.model(conv_case(), **attributes))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"scale": float("inf")}, "scale must be finite, found inf"),
        ({"update_rule": "delta"}, "update_rule must be gated_delta or gated, found delta"),
        ({"steps": 1}, "steps do not go with the update_rule gated_delta"),
        ({"beta_activation": "tanh"}, "beta_activation must be none or sigmoid, found tanh"),
        (
            {"update_rule": "gated", "channel_decay": 1},
            "channel_decay goes with the update_rule gated_delta alone",
        ),
    ],
)
def test_delta_nets_that_are_refused(
    library_path: Path, attributes: dict[str, object], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        matmul_cases.session(library_path, linear_cases.model(delta_case(), **attributes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": (8, 109)}, "query has 109 numbers of a token, which are no heads of 20 and 28"),
        ({"query": (8, 28)}, "query has 28 numbers of a token, which are no heads of 20 and 28"),
        (
            {"query": (8, 148)},
            "value heads must be a positive multiple of key heads, found 4 and 3",
        ),
        ({"decay": (8, 3)}, r"decay must have the shape \(8, 4\), found \(8, 3\)"),
        ({"beta": (7, 4)}, r"beta must have the shape \(8, 4\), found \(7, 4\)"),
        ({"a_log": (3,)}, r"a_log must have the shape \(4\), found \(3\)"),
        ({"dt_bias": (5,)}, r"dt_bias must have the shape \(4\), found \(5\)"),
        ({"pool": (9, 4, 7, 257)}, "a key must have 1 to 256 numbers, found 257"),
        (
            {"pool": (9, 4, 0, 20)},
            "query has 108 numbers of a token, which are no heads of 20 and 0",
        ),
        ({"pool": (9, 4, 7, 0)}, "a key must have 1 to 256 numbers, found 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    library_path: Path, changes: dict[str, tuple[int, ...]], message: str
) -> None:
    case = delta_case()
    session = matmul_cases.session(library_path, linear_cases.model(case))
    feeds = {**case.feeds(), "pool": case.pool}
    if changes.get("pool", ())[-1:] == (257,):
        feeds["query"] = np.zeros((8, 2 * 2 * 257 + 28), np.float32)
    feeds |= {name: np.zeros(shape, np.float32) for name, shape in changes.items()}
    with pytest.raises(Exception, match=message):
        session.run(["y"], feeds)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decay": (8, 4)}, r"decay must have the shape \(8, 80\), found \(8, 4\)"),
        ({"dt_bias": (4,)}, r"dt_bias must have the shape \(80\), found \(4\)"),
        ({"a_log": (80,)}, r"a_log must have the shape \(4\), found \(80\)"),
    ],
)
def test_channels_have_a_decay_each(
    library_path: Path, changes: dict[str, tuple[int, ...]], message: str
) -> None:
    case = linear_cases.make_channels(2, (2, 4), (20, 7), (3, 1, 4))
    session = matmul_cases.session(library_path, linear_cases.model(case))
    feeds = {**case.feeds(), "pool": case.pool}
    feeds |= {name: np.zeros(shape, np.float32) for name, shape in changes.items()}
    with pytest.raises(Exception, match=message):
        session.run(["y"], feeds)


@pytest.mark.parametrize("name", ["key", "value"])
def test_three_inputs_fit_one_another(library_path: Path, name: str) -> None:
    case = delta_case().replace(is_packed=False)
    session = matmul_cases.session(library_path, linear_cases.model(case))
    feeds = {**case.feeds(), "pool": case.pool}
    shorter = feeds | {name: feeds[name][:, :1]}
    with pytest.raises(Exception, match=f"{name} must have rows of the shape"):
        session.run(["y"], shorter)
    empty = feeds | {"value": feeds["value"][..., :0], "pool": case.pool[:, :, :0]}
    with pytest.raises(Exception, match="a value must have numbers, found 0"):
        session.run(["y"], empty)


def test_a_gate_has_both_of_its_vectors(library_path: Path) -> None:
    case = delta_case().replace(dt_bias=None)
    session = matmul_cases.session(library_path, linear_cases.model(case))
    with pytest.raises(Exception, match="a_log and dt_bias must be given together"):
        session.run(["y"], {**case.feeds(), "pool": case.pool})


@pytest.mark.parametrize(
    ("case", "rule"),
    [
        (delta_case(), "gated"),
        (linear_cases.make_gated(2, (2, 4), (20, 7), (3, 1, 4)), "gated_delta"),
    ],
)
def test_a_beta_comes_with_the_delta_rule(
    library_path: Path, case: linear_cases.DeltaCase, rule: str
) -> None:
    model = linear_cases.model(case, update_rule=rule)
    session = matmul_cases.session(library_path, model)
    with pytest.raises(Exception, match="beta must be given with the delta rule alone"):
        session.run(["y"], {**case.feeds(), "pool": case.pool})


def test_steps_are_made_of_a_gate(library_path: Path) -> None:
    case = linear_cases.make_gated(2, (2, 4), (20, 7), (3, 1, 4)).replace(has_steps=True)
    session = matmul_cases.session(library_path, linear_cases.model(case))
    with pytest.raises(Exception, match="steps are made with a_log and dt_bias"):
        session.run(["y"], {**case.feeds(), "pool": case.pool})


def check_standalone(command: list[str], isa: str) -> None:
    """Right, and the same bits in chunks, without ONNX Runtime."""
    cases: list[Case] = []
    for seed in range(NUM_CASES // 2):
        cases += [linear_cases.random_conv(seed), linear_cases.random_delta(seed)]
    for case, found in zip(cases, linear_cases.run_standalone(command, isa, cases), strict=True):
        linear_cases.check(case, found)
    for case in (
        linear_cases.make_conv(4, 70, 4, WHOLE),
        linear_cases.make_delta(4, (2, 4), (128, 35), WHOLE),
        linear_cases.make_channels(4, (2, 4), (128, 35), WHOLE),
        linear_cases.make_gated(4, (2, 4), (128, 35), WHOLE),
    ):
        ((whole, pool),) = linear_cases.run_standalone(command, isa, [case])
        begin, end = case.slots.ends[1:3]
        states, read, parts = case.pool, case.slots.reads[1], []
        for first, last, write in ((begin, begin + 7, 7), (begin + 7, end, 8)):
            chosen = Slots((last - first,), (read,), (write,))
            part = case.tokens(list(range(first, last)), chosen, states)
            ((output, states),) = linear_cases.run_standalone(command, isa, [part])
            parts.append(output)
            read = write
        assert np.concatenate(parts).tobytes() == whole[begin:end].tobytes()
        assert states[8].tobytes() == pool[case.slots.writes[1]].tobytes()


@pytest.mark.slow
@pytest.mark.skipif(platform.system() != "Linux", reason="links the driver statically")
@pytest.mark.skipif(not shutil.which(COMPILER), reason=f"needs {COMPILER}")
@pytest.mark.skipif(not ON_ARM and EMULATOR is None, reason="needs qemu-aarch64 (qemu-user)")
def test_on_arm(tmp_path: Path) -> None:
    driver = matmul_standalone.build(COMPILER, tmp_path, {}, "-static", driver="linear_driver")
    command = [*([EMULATOR] if EMULATOR else []), str(driver)]
    for isa in ("neon", "portable"):
        check_standalone(command, isa)


@pytest.mark.slow
@pytest.mark.skipif(platform.system() != "Linux", reason="needs g++'s ThreadSanitizer")
@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_threads_sanitized(tmp_path: Path) -> None:
    if not os.path.isabs(runtime("libtsan.so")):
        pytest.skip("g++ has no ThreadSanitizer library")
    sets = {"portable": ""}
    if matmul_isa() is not None and platform.machine() == "x86_64":
        sets["avx2"] = "-mavx2 -mfma -mf16c"
    flags = {"kernels_avx2": sets.get("avx2", "")}
    options = ("-fsanitize=thread", "-g1")
    driver = matmul_standalone.build("g++", tmp_path, flags, *options, driver="linear_driver")
    for isa in sets:
        check_standalone([str(driver)], isa)
