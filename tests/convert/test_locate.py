"""What a model's name means, offline: the hub is a fake here, or the real client against a server in this process."""

import http.server
import json
import os
import sys
import threading
from pathlib import Path

import pytest
from tiny_models import make_tiny_opt

from flashllm.base.user_dirs import user_cache_dir
from flashllm.cli import main
from flashllm.convert.hub import Hub, HubModel, needed_files
from flashllm.convert.locate import find_checkpoint, resolve_model
from flashllm.convert.named import is_demo, source_key
from flashllm.errors import FlashError, FlashIOError, FormatError, UnsupportedModelError, UsageError
from flashllm.format.manifest import MANIFEST, PARTIAL_SUFFIX, Manifest
from flashllm.format.model_files import FFN


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_tiny_opt(tmp_path_factory.mktemp("checkpoint") / "opt-tiny", num_layers=1, d_model=32, d_ff=64)


class FakeHub:
    """A hub that has one model."""

    def __init__(self, folder):
        self.folder = folder
        self.asked = []

    def download(self, model, say):
        self.asked.append(str(model))
        say(f"downloading {model}")
        return self.folder


def test_the_cache_is_in_the_home_directory_by_the_platforms_rule(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/tmp/cache")  # nothing is read from the environment
    monkeypatch.setattr(sys, "platform", "linux")
    assert user_cache_dir() == Path.home() / ".cache" / "flashllm"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert user_cache_dir() == Path.home() / "Library" / "Caches" / "flashllm"


def test_without_a_name_the_demo_is_meant(monkeypatch, tmp_path):
    assert is_demo(resolve_model(None))
    monkeypatch.setattr("flashllm.convert.named._DEMO", tmp_path)  # as in a published wheel
    with pytest.raises(FlashError, match="not in this installation; name a model: smollm2"):
        resolve_model(None)


def test_a_model_directory_is_used_where_it_is(checkpoint, tmp_path):
    path = resolve_model(str(checkpoint), cache=tmp_path)
    assert resolve_model(str(path), cache=tmp_path / "other") == path
    assert not (tmp_path / "other").exists()
    assert not is_demo(path)


def test_a_folder_is_converted_once_and_again_when_it_changed(checkpoint, tmp_path):
    said, reports = [], []
    first = resolve_model(str(checkpoint), cache=tmp_path, explain=said.append, progress=lambda *r: reports.append(r))
    assert first.parent == tmp_path / "models"
    assert Manifest.load(first).source.name == "opt-tiny"
    assert len(said) == 1
    assert str(first) in said[0]
    assert reports[-1][1] == reports[-1][2] > 0
    said.clear()
    assert resolve_model(str(checkpoint) + "/.", cache=tmp_path, explain=said.append) == first
    assert said == []
    status = (checkpoint / "config.json").stat()
    try:
        os.utime(checkpoint / "config.json", ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))
        assert resolve_model(str(checkpoint), cache=tmp_path, explain=said.append) != first
        assert len(said) == 1
    finally:
        os.utime(checkpoint / "config.json", ns=(status.st_atime_ns, status.st_mtime_ns))


def test_two_folders_of_one_name_do_not_share_a_conversion(tmp_path):
    for parent in ("a", "b"):
        (tmp_path / parent / "m").mkdir(parents=True)
        (tmp_path / parent / "m" / "config.json").write_text("{}")
        os.utime(tmp_path / parent / "m" / "config.json", (1, 1))
    assert source_key(tmp_path / "a" / "m") != source_key(tmp_path / "b" / "m")
    (tmp_path / "c").symlink_to(tmp_path / "a" / "m")
    assert source_key(tmp_path / "c") == source_key(tmp_path / "a" / "m")


def test_looking_at_a_model_converts_nothing(checkpoint, tmp_path):
    for model in (str(checkpoint), "someone/model"):
        with pytest.raises(UsageError, match="flashllm convert"):
            resolve_model(model, convert_on_first_use=False, cache=tmp_path, hub=FakeHub(checkpoint))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model", ["", "no-such-thing", "./a/b", "/no/such/dir", "a/b/c", "a/../b", "x\0y"])
def test_what_is_no_model_is_wrong_use(model, tmp_path):
    with pytest.raises(UsageError):
        resolve_model(model, cache=tmp_path, hub=FakeHub(tmp_path))


def test_a_hub_model_is_downloaded_and_converted_once(checkpoint, tmp_path):
    hub = FakeHub(checkpoint)
    path = resolve_model("someone/model", cache=tmp_path, hub=hub)
    assert path == tmp_path / "models" / "someone--model"
    assert Manifest.load(path).source.name == "someone/model"
    assert resolve_model("someone/model", cache=tmp_path, hub=hub) == path
    assert resolve_model("someone/model@refs/pr/2", cache=tmp_path, hub=hub) != path
    assert hub.asked == ["someone/model", "someone/model@refs/pr/2"]
    assert find_checkpoint("someone/model", hub=hub) == (checkpoint, "someone/model")
    assert find_checkpoint(str(checkpoint), hub=hub) == (checkpoint, None)


def test_a_cache_that_cannot_be_made_says_what_to_do(checkpoint, tmp_path):
    (tmp_path / "models").write_text("in the way")
    with pytest.raises(FlashIOError, match="flashllm convert"):
        resolve_model(str(checkpoint), cache=tmp_path)


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        *((name, name) for name in ("facebook/opt-1.3b", "a/b@main", "a/b@refs/pr/10")),
        ("hf.co/a/b", "a/b"),
        ("https://huggingface.co/a/b", "a/b"),
        ("https://huggingface.co/a/b/", "a/b"),
        ("http://www.huggingface.co/a/b/tree/main", "a/b"),
        ("https://hf.co/a/b/tree/v1.0", "a/b@v1.0"),
        ("https://huggingface.co/a/b/tree/refs%2Fpr%2F3", "a/b@refs/pr/3"),
        ("https://huggingface.co/a/b/blob/main/model.safetensors", "a/b"),
        ("https://huggingface.co/a/b/blob/main/x.Q4_K_M.gguf?download=true", "a/b/x.Q4_K_M.gguf"),
        ("https://huggingface.co/a/b/resolve/dev/q4/x.gguf", "a/b@dev/q4/x.gguf"),
        ("hf.co/a/b/x.gguf", "a/b/x.gguf"),
        ("hf.co/a/b/X.GGUF", "a/b/X.GGUF"),
        ("hf://a/b", "a/b"),
        ("hf://a/b@refs/pr/2/x.gguf", "a/b@refs/pr/2/x.gguf"),
        ("hf://a/b@main", "a/b"),
    ],
)
def test_ids_and_addresses(text, meaning):
    model = HubModel.parse(text)
    assert str(model) == meaning
    assert "/" not in model.directory_name


@pytest.mark.parametrize(
    "text",
    [
        "https://huggingface.co/datasets/a/b",
        "https://huggingface.co/a",
        "https://example.com/a/b",
        "hf.co/a/../b",
        "hf://",
        "ftp://huggingface.co/a/b",
        *("a", "a/b/c", "/a/b", "./a/b", "a/b@", "a/b@../x", "-a/b", "a/.b", "ä/b", "a/b\n", "a--b/c"),
    ],
)
def test_what_names_no_model_of_the_hubs(text):
    assert HubModel.parse(text) is None


def test_what_looks_like_a_path_is_never_the_hubs(tmp_path, monkeypatch, checkpoint):
    monkeypatch.chdir(tmp_path)
    hub = FakeHub(checkpoint)
    (tmp_path / "models").mkdir()
    with pytest.raises(UsageError, match=r"no such directory, though models is one.*hf\.co/models"):
        resolve_model("models/opt", cache=tmp_path, hub=hub)
    with pytest.raises(UsageError, match="there is no such file"):
        resolve_model("other/opt.gguf", cache=tmp_path, hub=hub)
    assert hub.asked == []
    assert find_checkpoint("hf.co/models/opt", hub=hub) == (checkpoint, "models/opt")


def test_a_file_of_weights_stands_for_its_folder(checkpoint, tmp_path):
    assert find_checkpoint(str(checkpoint / "model.safetensors")) == (checkpoint, None)
    for name in ("model.safetensors", "weights.bin"):
        (tmp_path / name).write_bytes(b"x")
        for find in (find_checkpoint, resolve_model):
            with pytest.raises(UsageError, match="is a file"):
                find(str(tmp_path / name))
    for name in ("model.gguf", "OTHER.GGUF"):
        (tmp_path / name).write_bytes(b"x")
        assert find_checkpoint(str(tmp_path / name)) == (tmp_path / name, None)
    with pytest.raises(UsageError, match=r"there is no such file; for one of the hub's"):
        find_checkpoint("other/ABSENT.GGUF")


def test_only_needed_files_are_downloaded():
    names = ["config.json", "tokenizer.json", "merges.txt", ".gitattributes", "README.md", "onnx/model.onnx",
             "original/config.json", "pytorch_model.bin", "flax_model.msgpack", "model.fp32.safetensors"]  # fmt: skip
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    small = ["config.json", "merges.txt", "tokenizer.json"]
    assert needed_files([*names, "model.safetensors"]) == [*small, "model.safetensors"]
    assert needed_files([*names, *shards, "model.safetensors"])[-1] == "model.safetensors"
    assert set(needed_files([*names, *shards])) == {*small, *shards}
    assert needed_files(names) == [*small, "pytorch_model.bin"]
    pickled = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "pytorch_model.bin.index.json"]
    names.remove("pytorch_model.bin")
    assert set(needed_files([*names, *pickled, "training_args.bin"])) == {*small, *pickled}
    with pytest.raises(UnsupportedModelError, match="safetensors"):
        needed_files(names)
    with pytest.raises(UnsupportedModelError, match=r"it holds an adapter .*merge_and_unload"):
        needed_files(["adapter_config.json", "adapter_model.safetensors", "config.json"])


@pytest.mark.parametrize(
    ("file", "hint"),
    [
        ("notes.txt", r"no Hugging Face folder \(no config.json\)$"),
        ("m.gguf", r"; for the GGUF file in it, name the file: .*folder/m.gguf$"),
        ("adapter_config.json", r"; it holds an adapter .*: merge it into its base model \(peft's merge_and_unload\)"),
    ],
)
def test_a_folder_that_holds_no_model(tmp_path, capsys, file, hint):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / file).touch()
    with pytest.raises(UsageError, match=r"is no model directory \(no flashllm.json\) and .*" + hint):
        resolve_model(str(folder))
    for verb in (["chat"], ["generate", "--prompt", "x"]):
        assert main([verb[0], str(folder), *verb[1:]]) == 2
        assert "is no model directory" in capsys.readouterr().err


def test_a_damaged_model_directory_is_opened_to_say_what_is_wrong(tmp_path):
    for name, file, says in (
        ("model", FFN, f"it has no {MANIFEST}"),
        (f"a{PARTIAL_SUFFIX}", "anything", "an unfinished conversion"),
        (f"b{PARTIAL_SUFFIX}", "config.json", "an unfinished conversion"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / file).touch()
        with pytest.raises(UsageError, match=says):
            resolve_model(str(folder))


@pytest.mark.parametrize("address", ["hf.co/foo/bar:Q4_K_M", "hf.co/foo", "https://huggingface.co/datasets/foo/bar"])
def test_an_address_that_names_no_model(address):
    with pytest.raises(UsageError, match=r"names no model of the hub's; write hf\.co/owner/name"):
        find_checkpoint(address)


# The real client, against a hub of our own.


class HubServer(http.server.ThreadingHTTPServer):
    """Serves folders as repositories, in the hub's protocol."""

    repos: dict
    requests: list

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubHandler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.server.requests.append(self.path)
        path = self.path.partition("?")[0].removeprefix("/")
        if path.startswith("api/models/"):
            parts = path.split("/")
            self._api("/".join(parts[2:4]), parts[4:])
        elif "/resolve/" in path:
            repo, _, rest = path.partition("/resolve/")
            self._file(self.server.repos[repo] / rest.partition("/")[2])
        else:
            self._send(404, b"{}")

    def _api(self, repo, rest):
        if repo not in self.server.repos:
            code = {"gated/model": "GatedRepo", "broken/model": None}.get(repo, "RepoNotFound")
            status = {"GatedRepo": 403, "RepoNotFound": 404, None: 500}[code]
            self._send(status, b"{}", {} if code is None else {"X-Error-Code": code})
        elif rest[:1] == ["revision"] and rest[1] not in ("main", COMMIT):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            files = sorted(path for path in self.server.repos[repo].iterdir() if path.is_file())
            if rest[:1] == ["tree"]:
                entries = [
                    {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": "0" * 40} for path in files
                ]
                self._send(200, json.dumps(entries).encode())
            else:
                siblings = [{"rfilename": path.name, "size": path.stat().st_size} for path in files]
                self._send(200, json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode())

    def _file(self, path):
        if not path.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        self._send(200, path.read_bytes(), {"ETag": f'"{path.name}"', "X-Repo-Commit": COMMIT})

    def _send(self, status, body, headers=None):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


TEXT = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}
PICTURES = {"model_type": "gemma3", "text_config": {**TEXT, "model_type": "gemma3_text"}, "vision_config": {}}


@pytest.fixture
def server(checkpoint, tmp_path):
    (checkpoint / "README.md").write_text("not needed")
    config = (checkpoint / "config.json").read_bytes()
    repos = {
        "gpt": {"config.json": b'{"model_type": "xlnet"}', "model.safetensors": b"x" * 1000},
        "tensorflow": {"config.json": config, "tf_model.h5": b"x"},
        "empty": {},
        "pictures": {"config.json": json.dumps(PICTURES).encode(), "model.safetensors": b"x" * 1000},
        "vendor": {"config.json": b'{"model_type": "kimi_k2"}', "model.safetensors": b"x" * 1000},
        "adapter": dict.fromkeys(("adapter_config.json", "adapter_model.safetensors"), b"{}"),
        "gguf": {
            name: name.encode() for name in ("x-00001-of-00002.gguf", "x-00002-of-00002.gguf", "y.gguf", "Z.GGUF")
        },
    }
    for repo, files in repos.items():
        (tmp_path / repo).mkdir()
        for name, content in files.items():
            (tmp_path / repo / name).write_bytes(content)
    server = HubServer(("127.0.0.1", 0), HubHandler)
    server.requests = []
    server.repos = {"some/opt": checkpoint, **{f"some/{repo}": tmp_path / repo for repo in repos}}
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_real_client_fetches_a_model_and_only_its_needed_files(server, checkpoint, tmp_path):
    hub, said = Hub(server.endpoint, tmp_path / "hub"), []
    path = resolve_model("some/opt", cache=tmp_path / "cache", hub=hub, say=said.append)
    assert Manifest.load(path).source.name == "some/opt"
    assert said[0].startswith("downloading some/opt: ")
    assert not any("README" in request for request in server.requests)
    folder = hub.download(HubModel(repo="some/opt"), lambda line: None)
    assert (folder / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()


def test_an_unsupported_model_costs_no_download(server, tmp_path):
    hub = Hub(server.endpoint, tmp_path / "hub")
    for repo, error, message in (
        ("some/gpt", UnsupportedModelError, r"some/gpt: .*xlnet"),
        ("some/tensorflow", UnsupportedModelError, r"some/tensorflow: .*refs/pr"),
        ("some/empty", FormatError, "config"),
        ("some/adapter", FormatError, r"adapter: has no config\.json, .*; it holds an adapter .*merge_and_unl"),
    ):
        with pytest.raises(error, match=message):
            hub.download(HubModel(repo=repo), lambda line: None)
    assert not any("safetensors" in request or ".h5" in request for request in server.requests)


@pytest.mark.parametrize("name", ["pictures", "vendor"])
def test_a_model_whose_text_alone_runs_is_downloaded(server, tmp_path, name):
    folder = Hub(server.endpoint, tmp_path / "hub").download(HubModel(repo=f"some/{name}"), lambda line: None)
    assert (folder / "model.safetensors").stat().st_size == 1000


def test_a_gguf_file_of_the_hubs_comes_alone_or_with_its_other_parts(server, tmp_path):
    hub, said = Hub(server.endpoint, tmp_path / "hub"), []
    path = hub.download(HubModel.parse("hf.co/some/gguf/y.gguf"), said.append)
    assert path.read_bytes() == b"y.gguf"
    assert said == ["downloading some/gguf/y.gguf: 1 file(s), 6 B"]
    assert hub.download(HubModel.parse("hf.co/some/gguf/Z.GGUF"), said.append).read_bytes() == b"Z.GGUF"
    path = hub.download(HubModel.parse("hf.co/some/gguf/x-00001-of-00002.gguf"), said.append)
    assert path.with_name("x-00002-of-00002.gguf").exists()
    with pytest.raises(UsageError, match=r"no such file; GGUF files there: Z\.GGUF, x-00001.*, y\.gguf"):
        hub.download(HubModel.parse("hf.co/some/gguf/z.gguf"), said.append)
    with pytest.raises(UsageError, match=r"some/gguf: holds GGUF files; name one: .*hf\.co/some/gguf/y\.gguf"):
        hub.download(HubModel.parse("some/gguf"), said.append)
    offline = Hub("http://127.0.0.1:9", tmp_path / "hub")
    assert offline.download(HubModel.parse("hf.co/some/gguf/y.gguf"), said.append).read_bytes() == b"y.gguf"
    with pytest.raises(FlashIOError, match=r"download z\.gguf elsewhere, from https://huggingface.co/some/gguf"):
        offline.download(HubModel.parse("hf.co/some/gguf/z.gguf"), said.append)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("no/model", UsageError, "neither a directory here nor a model on the hub"),
        ("gated/model", UsageError, "accept the terms"),
        ("some/opt@nope", UsageError, "no revision nope"),
        ("broken/model", FlashIOError, "the hub refused"),
    ],
)
def test_what_the_hub_refuses(server, tmp_path, name, kind, message):
    with pytest.raises(kind, match=message):
        Hub(server.endpoint, tmp_path / "hub").download(HubModel.parse(name), lambda line: None)


def test_offline_an_earlier_download_serves_and_a_missing_one_is_explained(server, tmp_path):
    model, said = HubModel(repo="some/opt"), []
    Hub(server.endpoint, tmp_path / "hub").download(model, said.append)
    folder = Hub("http://127.0.0.1:9", tmp_path / "hub").download(model, said.append)
    assert (folder / "model.safetensors").exists()
    assert "using the files downloaded earlier" in said[-1]
    with pytest.raises(FlashIOError, match=r"cannot be reached.*download config\.json.*into a folder"):
        Hub("http://127.0.0.1:9", tmp_path / "empty").download(model, said.append)
