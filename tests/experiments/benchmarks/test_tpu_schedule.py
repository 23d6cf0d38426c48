"""The model of the TPU kernels: how bundles are read, what follows from them, what is written."""

import importlib.util
import json
import pathlib

import pytest

import dms_jax
from experiments.benchmarks import tpu_bundles, tpu_schedule
from experiments.benchmarks.tpu_bundles import Loop

ROOT = pathlib.Path(__file__).resolve().parents[3]

# A loop of three rounds around one whose number of rounds is known only when it runs. After a
# branch four bundles are executed in any case.
TEXT = """
= control target key start
LH: loop header
= control target key end

     0   :  { %s1 = smov 0 } /* Start region 9 */
   0x1 LB: > { %s2 = sphi %s1, %s3
 } /* Start region 10 :: Start region 11 */
   0x2 LB: >> { %5 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s4, /*size_in_granules=*/512, /*vm */ } /* Start region 20 */
   0x3   : >> { %p3 = scmp.ge.s32.totalorder %s9, %s8 }
   0x4   : > { %6 = sbr.rel (!%p3) target = $region20 }
   0x5   : >> {}
   0x6   : >> {}
   0x7   : >> {}
   0x8   : >> {} /* End region 20 */
   0x9   : > { %7 = dma.done.wait [#allocation1], 32 }
   0xa   : > { %8 = sbr.rel (%p4) target = $region30 }
   0xb   : > { %p1 = scmp.ge.s32.totalorder %s3, 3 /* loop exit test */ } /* Start/End empty region 30 */
   0xc   :  { %9 = sbr.rel (!%p1) target = $region11 }
   0xd   :  {}
   0xe   :  {}
   0xf   :  {}
  0x10   :  {}
  0x11   :  { %10 = vsyncpa [#allocation1], 1 }
"""  # noqa: E501


def loop(bundles, *loops, copies=(), waits=0, rounds=None):
    return Loop(bundles, tuple(copies), waits, rounds, loops)


# A row of two blocks of two runs of four pages of 16 slots each, whose keys and values are copied.
# The loops before it start the copies of tables, and of the blocks of all buffers but one.
PAGE, TABLE = ("hbm_to_vmem", 4096), ("hbm_to_smem", 512)
BEFORE = (
    loop(11, copies=[TABLE], rounds=15),
    loop(
        70,
        loop(40, copies=[PAGE] * 8, rounds=2),
        loop(15, copies=[PAGE] * 2),
        copies=[TABLE],
        waits=1,
        rounds=4,
    ),
)
KERNEL = loop(
    5,
    loop(
        100,
        *BEFORE,
        loop(
            300,
            loop(40, copies=[PAGE] * 8, rounds=2),
            loop(15, copies=[PAGE] * 2),
            loop(8, waits=1),
            copies=[TABLE],
            waits=2,
        ),
        rounds=258,
    ),
    rounds=1,
)
# A program of a prompt: the first copies, tiles that are seen whole, tiles that are masked.
TILE = loop(7)
PROMPT = loop(
    5, loop(200, loop(100, TILE), loop(300, TILE, waits=3), loop(320, TILE, waits=3), rounds=130)
)


def test_loops_of_bundles_are_read():
    whole = tpu_bundles.parse(TEXT)
    (outer,) = whole.loops
    (inner,) = outer.loops
    assert (whole.bundles, whole.rounds) == (2, 1)
    assert (outer.bundles, outer.rounds, outer.waits, outer.copies) == (9, 3, 1, ())
    assert (inner.bundles, inner.rounds, inner.copies) == (7, None, (("hbm_to_vmem", 16384),))
    assert whole.nested == (whole, outer, inner)
    assert whole.total() == 2 + 3 * (9 + 7)
    assert loop(2, loop(3, rounds=4), rounds=5).total() == 5 * (2 + 4 * 3)


def test_the_share_of_the_bandwidth_follows_from_bytes_bundles_and_latency():
    parts = tpu_schedule.decode_parts(KERNEL, 256, 16)
    assert parts == {
        "buffers": 5,
        "row_bundles": 100,
        "block_bundles": 380,
        "starting_bundles": 80,
        "copies_a_block": 16,
        "bytes_a_copy": 4096,
        "bytes_a_block": 65536,
        "slots_a_block": 128,
        "blocks_a_row": 2,
    }
    # Two cores share 2 TB/s: 65.536 ns of bytes, and 430 bundles at 1 GHz.
    chip = tpu_schedule.Chip("kind", "topology", 2, 1e9)
    said = tpu_schedule.decode_share(parts, 256, chip, 2e12)
    assert said == {
        "copy_cycles": 66,
        "cycles": 430,
        "share_at_0_us": round(65.536 / 430, 3),
        "share_at_0.5_us": round(65.536 / 430, 3),
        "share_at_1_us": round(65.536 / 430, 3),
    }
    # With two buffers a copy does not start before the block in its buffer has been computed.
    two = tpu_schedule.decode_share(parts | {"buffers": 2}, 256, chip, 2e12)
    assert two["share_at_0.5_us"] == round(65.536 / ((65.536 + 430 + 500) / 2), 3)
    assert two["share_at_1_us"] == round(65.536 / ((65.536 + 430 + 1000) / 2), 3)
    # Half a last block is copied by half and computed as a whole.
    short = tpu_schedule.decode_share(parts, 192, chip, 2e12)
    assert (short["copy_cycles"], short["cycles"]) == (49, 430)
    block = loop(70, loop(8, waits=1), copies=[PAGE] * 8 + [TABLE], waits=2)
    parts = tpu_schedule.decode_parts(loop(5, loop(9, *BEFORE, block)), 64, 16)
    assert (parts["copies_a_block"], parts["slots_a_block"], parts["block_bundles"]) == (8, 64, 70)


def test_a_report_and_its_page_are_written(monkeypatch, tmp_path):
    selection = loop(3, loop(50, loop(10), loop(60, rounds=8), rounds=4), rounds=1)
    gather = loop(4, loop(90, copies=[("hbm_to_vmem", 512)], rounds=32), rounds=1)

    def compiled(chip, operation, implementation, shape):
        if operation == "decode":
            return {"decode_attention.1": KERNEL}
        if operation == "prefill":
            return {"prefill.1": PROMPT}
        return {"select_largest.1": selection} if implementation != "xla" else {"fusion": gather}

    monkeypatch.setattr(tpu_schedule, "compiled", compiled)
    tpu_schedule.main(tpu_schedule.Config(out=tmp_path, chips=("v6e",)))
    report = json.loads((tmp_path / "schedule.json").read_text())
    prompts = [one for one in report["records"] if one["operation"] == "prefill"]
    assert [one["group"] for one in prompts] == [1, 4]
    for one in prompts:
        # 64 KB at 1.64 TB/s, and 1.75 GHz; with two buffers a copy is waited for.
        assert (one["copy_cycles"], one["cycles"], one["masked_cycles"]) == (70, 300, 320)
        assert one["cycles_in_8_at_1_us"] == 300
        assert one["cycles_in_2_at_1_us"] == round((70 + 300 + 1750) / 2)
    others = [one for one in report["records"] if one["operation"] in ("select", "fetch")]
    cycles = [one["cycles"] for one in others]
    selected = 2 * (50 + 32 * 10 + 8 * 60)
    assert cycles == [selected, 4 + 32 * 90] * 2 + [4 + 32 * 90]
    assert report["records"][-1]["bytes_a_copy"] == 512
    assert "no TPU was at hand" in report["model"]
    page = (tmp_path / "README.md").read_text()
    assert "A model, not a measurement: no TPU was at hand." in page
    assert page.count("| v6e |") == len(report["records"])
    with pytest.raises(dms_jax.ConfigError, match="known are v5e, v5p, v6e"):
        tpu_schedule.main(tpu_schedule.Config(out=tmp_path, chips=("v3",)))


def test_the_committed_page_is_that_of_the_committed_report():
    folder = ROOT / "experiments" / "results" / "tpu_schedule"
    records = json.loads((folder / "schedule.json").read_text())["records"]
    assert {one["chip"] for one in records} == set(tpu_schedule.CHIPS)
    assert (folder / "README.md").read_text() == tpu_schedule.page(records)


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_bundles_of_a_program_are_found():
    """XLA fetches each of 256 rows with the other that shares its words, by a copy of its own."""
    found = tpu_schedule.compiled(tpu_schedule.CHIPS["v5e"], "fetch", "xla", (256, 1 << 20, 1))
    loops = [one for whole in found.values() for one in whole.nested]
    rows = sum(one.copies.count(("hbm_to_vmem", 512)) * (one.rounds or 1) for one in loops)
    assert rows == 256
    assert 256 < sum(whole.total() for whole in found.values()) < 256 * 50
