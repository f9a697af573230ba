"""The bench scripts of the planner run, and what they rest on holds."""

import json

import numpy as np
import pytest
from offload_host import policy_of

from flashllm.base.machine import process_nbytes
from flashllm.offload.machine.machines import T4


def test_t4_is_what_the_fit_gives():
    import offload_fit

    _, fitted = offload_fit.fit()
    for name in ("gemm", "device_bandwidth", "ctog", "dtoc", "ctod", "cpu_attention"):
        shipped, derived = getattr(T4, name), getattr(fitted, name)
        for size in (1e3, 1e6, 1e9):
            assert shipped.at(size) == pytest.approx(derived.at(size), rel=0.01), name


def test_the_fit_meets_every_figure_it_uses(capsys):
    import offload_fit

    assert offload_fit.main([]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert len(rows) == 12
    for row in rows:
        if not row["figure"].endswith(offload_fit.LEFT_OUT):
            assert row["model"] == pytest.approx(row["paper"], rel=0.05), row["figure"]


def test_the_fit_uses_no_held_out_cell():
    import offload_fit
    import offload_plan

    used = {value for _, _, value in offload_fit.ROWS} | set(offload_fit.TABLE_4.values())
    held_out = {paper for _, _, paper, _, _, use in offload_plan.TABLE_2 if use != offload_plan.USED}
    assert len(held_out) == 10
    assert not used & held_out


def test_held_out_cells_are_within_a_quarter():
    import offload_plan

    rows = [row for row in offload_plan.TABLE_2 if row[5] == offload_plan.HELD_OUT]
    for record in offload_plan.table_2(rows, offload_plan.COARSE):
        for key in ("at_paper_policy", "searched_paper_tiers"):
            assert record[key] == pytest.approx(record["paper"], rel=0.25), (record["model"], record["prompt_len"], key)


def test_plan_writes_its_results(tmp_path, capsys):
    import offload_plan

    assert offload_plan.main(["--quick", "--out", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["held_out"]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"offload_plan.json", "offload_plan.md", "offload_frontier.png"}
    assert "| 6.7b @ 512 | held out |" in (tmp_path / "offload_plan.md").read_text()
    frontier = json.loads((tmp_path / "offload_plan.json").read_text())["frontier"]["opt-175b"]
    ours = max(throughput for _, throughput in frontier["flashllm"])
    assert ours > 20 * max(throughput for _, throughput in frontier["row by row"])  # figure 1: some 40 to 69 times


def test_profile_check_runs(tmp_path, capsys):
    import offload_profile

    out = tmp_path / "p.json"
    assert offload_profile.main(["--quick", "--dir", str(tmp_path), "--json", str(out)]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = json.loads(out.read_text())["rows"]
    assert {row["what"] for row in rows} >= {"disk to CPU", "CPU to disk", "gemm 128x256"}
    assert summary["within"] <= len(rows)
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


def test_a_copy_in_the_papers_groups_has_rounded_layers_and_nothing_else(tmp_path):
    import group_codec
    import rounded_copies
    from safetensors.numpy import load_file
    from tiny_models import make_tiny_opt

    folder = make_tiny_opt(tmp_path / "hf", d_ff=200)
    copy = rounded_copies.copy_in_the_papers_groups(folder, tmp_path / "copy", 4)
    before, after = (load_file(path / "model.safetensors") for path in (folder, copy))
    assert before.keys() == after.keys()
    for name, values in before.items():
        is_matrix = values.ndim == 2 and ".layers." in name
        panels = [values[r : r + 64] for r in range(0, len(values), 64)]
        expected = [group_codec.pack_columns(panel, 4)[1] if is_matrix else panel for panel in panels]
        np.testing.assert_array_equal(after[name], np.concatenate(expected))


def test_tables_are_measured(tmp_path, capsys, monkeypatch):
    import offload_pipeline
    import offload_run  # which makes the group's module known
    import offload_tables
    from workers import run as run_worker

    model = offload_pipeline.make_tiny(tmp_path / "tiny")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(offload_tables, "worker", lambda script, settings, memory: run_worker.run(settings))
    assert offload_run.num_layers(model) == 5
    sizes = {"sequences": 4, "batch": 2, "prompt": 9, "new": 4, "scratch": str(tmp_path)}
    for bits in (None, 4):
        found = run_worker.roofs(offload_run.run_settings(model, policy_of(), weight_bits=bits, **sizes))
        assert min(found["prefill_products_s"], found["decode_products_s"], found["read_bytes_per_s"]) > 0
        assert isinstance(found["read_direct"], bool)

    def table(name: str, *options: str) -> list[dict[str, object]]:
        argv = [name, str(model), "--prompt", "9", "--new", "4", "--scratch", str(tmp_path), *options]
        assert offload_tables.main(argv) == 0
        document = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert document["command"].startswith(f"offload_tables.py {name} tiny --prompt 9")
        return document["rows"]

    rows = table("breakdown", "--sequences", "4", "--batch", "2")
    assert [(row["run"], row["stage"]) for row in rows] == [
        (run, stage) for run in ("16 bit", "4 bit") for stage in ("prefill", "decoding")
    ]
    assert all(0 < row["compute"] <= row["total"] for row in rows if row["stage"] == "prefill")
    limit = process_nbytes() + 300_000_000  # the runs are in this process, which other tests have made larger
    rows = table("ablation", "--sequences", "12", "--memory", str(limit))
    assert len(rows) == 5
    assert all("throughput" in row or "does not fit" in row for row in rows)
    assert (rows[0]["of_all"], rows[-1]["blocks"]) == (1.0, 2)
    rows = table("frontier", "--batches", "1", "4")
    assert [row["batch"] for row in rows] == [1, 4, 1, 4]
    assert any(row["on_frontier"] for row in rows)


def test_pipeline_scaling_runs(tmp_path, capsys):
    import offload_pipeline

    out = tmp_path / "p.json"
    assert (
        offload_pipeline.main(["--tiny", "--processes", "1", "2", "--scratch", str(tmp_path), "--json", str(out)]) == 0
    )
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document == json.loads(out.read_text())
    assert document["same_tokens"]
    one, two = document["rows"]
    assert (one["sequences"], two["sequences"]) == (2, 4)
    assert (one["layers"], sum(two["layers"])) == ([5], 5)
    assert two["of_one"] == pytest.approx(two["throughput"] / one["throughput"])
