"""A hypothesis target for every parser: whatever is done to right bytes, they are taken, or refused by one typed error
that names the file. JSON is changed as a tree, so that it is refused for what it says and not as no JSON."""

import copy
import json
import sys

import mutations
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import GOOD, judged, mutated
from written import every_kind

from flashllm.convert.checkpoint import pickled

NAMES = (
    "manifest", "manifest with planes", "model directory: config.json", "model directory: tokenizer.json",
    "model directory: tokenizer_config.json", "model directory: generation_config.json",
    "model directory: resident.safetensors", "model directory: ffn.safetensors",
    "model directory: predictors.safetensors", "model directory with planes: resident.safetensors", "popularity",
    "checkpoint: config.json", "checkpoint: tokenizer.json", "checkpoint: model.safetensors",
    "checkpoint: model.safetensors.index.json", "checkpoint: pytorch_model.bin",
    "checkpoint: pytorch_model.bin.index.json", "GGUF", "GGUF of codes", "profile", "hardware file",
    "policy", "shape of a model", "batch line", "answers of a batch job", "chat request", "completion request",
    "Ollama request", "saved conversation", "journal of a conversion",
)  # fmt: skip

leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.integers(), st.sampled_from([2**31, 2**62, 2**63, 10**400]),
    st.floats(), st.text(max_size=8), st.sampled_from(["A" * 5000, "\0", "\ud800", "../x", "/etc/passwd"]),
)  # fmt: skip
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


def places(value, found):
    """Every (container, key) in a tree."""
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        found.append((value, key))
        if isinstance(each, dict | list):
            places(each, found)
    return found


def changed_tree(data, tree):
    """One to three values replaced, removed, wrapped, or put under another name."""
    tree = copy.deepcopy(tree)
    for _ in range(data.draw(st.integers(1, 3))):
        found = places(tree, []) if isinstance(tree, dict | list) else []
        if not found:
            return data.draw(values)
        container, key = found[data.draw(st.integers(0, len(found) - 1))]
        match data.draw(st.sampled_from(["replace", "replace", "remove", "wrap", "rename"])):
            case "replace":
                container[key] = data.draw(values)
            case "remove":
                del container[key]
            case "wrap":
                container[key] = [container[key]]
            case _ if isinstance(container, dict):
                container[data.draw(st.text(max_size=5))] = container.pop(key)
            case _:
                container.append(container[key])
    return tree


def as_text(tree):
    return json.dumps(tree).encode("utf-8", "surrogatepass")


def changed(data, kind):
    """Other bytes than the right ones; those of JSON and of safetensors' headers are still JSON three times in four."""
    kept = data.draw(st.integers(0, 3)) > 0
    if kind.is_json and kept and b"\n" not in kind.base.strip():
        return as_text(changed_tree(data, json.loads(kind.base)))
    if kept and kind.base[8:9] == b"{":
        end = 8 + int.from_bytes(kind.base[:8], "little")
        header = as_text(changed_tree(data, json.loads(kind.base[8:end])))
        header += b" " * (-len(header) % 8)
        return len(header).to_bytes(8, "little") + header + kind.base[end:]
    return mutated(kind.base, data.draw(st.randoms(use_true_random=False)), is_json=kind.is_json)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickled, "ask_child", pickled.ask_child)  # what they put in its place shall not stay
        yield every_kind(tmp_path_factory.mktemp("kinds"))


def test_every_kind_has_a_target(kinds):
    assert set(NAMES) == set(kinds)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_change_is_taken_or_refused(kinds, name, data):
    result, said = judged(kinds[name], changed(data, kinds[name]))
    assert result in GOOD, said


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_sample_of_what_the_script_does(kinds, capfd, monkeypatch):
    monkeypatch.setattr(mutations, "every_kind", lambda folder: kinds)
    assert mutations.main(["--each", "8", "--command", "5"]) == 0, capfd.readouterr()
    table = json.loads(capfd.readouterr().out.splitlines()[-1])["table"]
    assert sum(row["tried"] for row in table) >= 30 * 8 + 5
    assert sum(row.get("refused", 0) for row in table) > 100
