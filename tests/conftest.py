"""The core that tests run on, and tiny models: made and converted once a session, loaded by each test, closed after it.

Tests run on `_core_testing`, which is `_core` but for reads and writes that can be made to fail; an editable install
builds both. Processes that tests start run the product's.
"""

import dataclasses
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import core_testing  # noqa: F401 - first: it puts _core_testing in _core's place
import predictor_files
import pytest
import torch
from arch_models import make_model
from generating import greedy, ids_of
from tiny_models import make_tiny_opt
from transformers import AutoTokenizer, OPTForCausalLM

from flashllm import FlashModel
from flashllm.config import RunConfig
from flashllm.convert.run import convert
from flashllm.engine.model import Model
from flashllm.format.manifest import Manifest

CONTEXT = 96  # tokens the tiny model allows
BLOCK_ROWS = 128  # four dense blocks a layer

# A script's background jobs ignore them, or those under nohup, and so would the runs that tests interrupt.
_HANDLERS = {signal.SIGINT: signal.default_int_handler, signal.SIGQUIT: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
for _number, _handler in _HANDLERS.items():
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)


@dataclass(frozen=True)
class TinyModel:
    """One dtype: the Hugging Face folder, the dense model, and a model directory for each kind of predictor."""

    dtype: str
    source: Path
    reference: Any
    tokenizer: Any
    directories: dict[str, Path]  # by kind of predictor; "bare" has none

    def path(self, predictors: str = "exact") -> Path:
        return self.directories[predictors]


def _make(root: Path, dtype: str) -> TinyModel:
    source = make_tiny_opt(root / "hf", num_layers=3, d_ff=512, context=CONTEXT, dtype=dtype)
    bare = root / "bare"
    convert(source, bare)
    dataclasses.replace(Manifest.load(bare), stream_block_rows=BLOCK_ROWS).save(bare)
    directories = {"bare": bare}
    for kind in predictor_files.KINDS:
        directories[kind] = Path(shutil.copytree(bare, root / kind))
        predictor_files.install(kind, source, directories[kind], root)
    reference = OPTForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype)).eval()
    return TinyModel(dtype, source, reference, AutoTokenizer.from_pretrained(source), directories)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The user's calibration of this machine changes how runs read, and must not change what tests see."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder in one test; it is not there yet."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """The tiny model of a dtype ("float32", "float16", "bfloat16"), made on first use. Never change its directories."""
    made: dict[str, TinyModel] = {}

    def get(dtype: str = "float32") -> TinyModel:
        if dtype not in made:
            made[dtype] = _make(tmp_path_factory.mktemp(dtype), dtype)
        return made[dtype]

    return get


@pytest.fixture(scope="session")
def variant_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """(Hugging Face folder, model directory) of a variant of arch_models.py, made on first use. Not to be changed."""
    made: dict[str, tuple[Path, Path]] = {}

    def get(name: str) -> tuple[Path, Path]:
        if name not in made:
            made[name] = make_model(tmp_path_factory.mktemp("variant"), name)
        return made[name]

    return get


@pytest.fixture
def opened() -> Iterator[Callable[..., Model]]:
    """`Model.open` with one compute thread and few reader threads; closed after the test."""
    models: list[Model] = []

    def get(path: Path, **options: Any) -> Model:
        models.append(Model.open(path, RunConfig(**{"threads": 1, "io_threads": 4, **options})))
        return models[-1]

    yield get
    for model in models:
        model.close()


@pytest.fixture
def load() -> Iterator[Callable[..., Any]]:
    """`FlashModel.from_pretrained` with one compute thread and few reader threads; closed at the end of the test."""
    loaded = []

    def open_model(path: Path, **options: Any) -> Any:
        model = FlashModel.from_pretrained(path, **{"threads": 1, "io_threads": 4, **options})
        loaded.append(model)
        return model

    yield open_model
    for model in loaded:
        model.close()


@pytest.fixture(scope="module")
def undisturbed(tiny):
    """Greedy tokens of the sparse model with a predictor that is often wrong, after a long and after a short prompt."""
    model = tiny("bfloat16")
    with FlashModel.from_pretrained(model.path("random"), threads=1, io_threads=4).engine as engine:
        assert engine.direct_io or engine.notices
    flash = FlashModel.from_pretrained(model.path("random"), threads=1, io_threads=4)
    tokens = [greedy(flash, ids_of(length)) for length in (30, 4)]
    logits = flash(ids_of(6)).logits
    flash.engine.close()
    return tokens, logits
