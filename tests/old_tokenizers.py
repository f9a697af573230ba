"""Tokenizers as older checkpoints have them: vocabulary files instead of `tokenizer.json`."""

import json
import shutil

from flashllm.convert.tokenizer import TOKENIZER


def as_published(folder, target):
    """The folder with its tokenizer as the OPTs on the hub have it: vocab.json, merges.txt, two files of facts."""
    shutil.copytree(folder, target)
    whole = json.loads((target / TOKENIZER).read_text())
    for name in (TOKENIZER, "tokenizer_config.json"):
        (target / name).unlink()
    (target / "vocab.json").write_text(json.dumps(whole["model"]["vocab"]))
    merges = [" ".join(pair) for pair in whole["model"]["merges"]]
    (target / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))

    def token(text):
        return {"content": text, "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}

    tokens = {"bos_token": token("</s>"), "eos_token": token("</s>"), "unk_token": token("</s>")}
    tokens["pad_token"] = token("<pad>")
    (target / "special_tokens_map.json").write_text(json.dumps(tokens))
    config = {name: {"__type": "AddedToken", **value} for name, value in tokens.items()}
    config |= {
        "errors": "replace",
        "add_prefix_space": False,
        "add_bos_token": True,
        "tokenizer_class": "GPT2Tokenizer",
    }
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return target
