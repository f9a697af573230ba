"""What a FlashModel says of itself, the arguments it refuses, and what cannot be done with it."""

import copy

import pytest
import torch
from generating import ids_of
from transformers import GenerationMixin, PreTrainedModel

from flashllm import FlashModel
from flashllm.config import RunConfig
from flashllm.errors import UsageError


@pytest.fixture
def flash(shared):
    return shared()


def test_it_is_a_hugging_face_causal_lm(tiny, flash):
    assert isinstance(flash, FlashModel)
    assert isinstance(flash, PreTrainedModel)
    assert isinstance(flash, GenerationMixin)
    assert type(flash).__name__ == type(tiny().reference).__name__
    assert flash.can_generate()
    assert (flash.device, flash.dtype, flash.training) == (torch.device("cpu"), torch.float32, False)
    assert flash.config.hidden_size == 64
    assert flash.generation_config.eos_token_id == 2
    assert not list(flash.named_parameters())  # so no `weight.data = x` that nobody reads
    assert not list(flash.named_buffers())


@pytest.mark.parametrize("exclude_embeddings", [False, True])
def test_its_parameters_are_counted_as_the_original_s(tiny, flash, exclude_embeddings):
    expected = tiny().reference.num_parameters(exclude_embeddings=exclude_embeddings)
    assert flash.num_parameters(exclude_embeddings=exclude_embeddings) == expected
    assert flash.num_parameters(only_trainable=True) == 0
    assert flash.get_memory_footprint() == flash.engine.plan.memory.total_nbytes


def test_output_has_no_gradient_and_may_be_a_tuple(tiny, flash):
    ids = ids_of(6)
    output = flash(ids, labels=ids)
    logits, cache = flash(ids, return_dict=False)
    assert not output.logits.requires_grad
    assert torch.equal(output.logits, logits)
    assert cache.get_seq_length() == 6
    assert flash(ids, use_cache=False).past_key_values is None
    with torch.no_grad():
        expected = tiny().reference(ids, labels=ids).loss
    assert abs(output.loss - expected) < 1e-5


def test_the_loss_leaves_padding_out(flash):
    ids, mask = ids_of(6, rows=2), torch.ones((2, 6), dtype=torch.long)
    mask[1, :2] = 0
    loss = flash(ids, attention_mask=mask, labels=ids).loss
    apart = [flash(ids[:1], labels=ids[:1]).loss * 5, flash(ids[1:, 2:], labels=ids[1:, 2:]).loss * 3]
    assert abs(loss - sum(apart) / 8) < 1e-5


@pytest.mark.parametrize("keep", [1, 3, 0, torch.tensor([0, 4])], ids=str)
def test_logits_to_keep(flash, keep):
    ids = ids_of(6, rows=2)
    whole = flash(ids).logits
    expected = whole[:, keep] if isinstance(keep, torch.Tensor) else whole[:, -keep:]
    assert torch.equal(flash(ids, logits_to_keep=keep).logits, expected)


def test_positions_may_be_given_where_they_are_those_that_follow(flash):
    ids, mask = ids_of(4, rows=2), torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 3], [0, 0, 0, 1]])
    out = flash(ids, attention_mask=mask, position_ids=positions)
    assert torch.equal(out.logits, flash(ids, attention_mask=mask).logits)
    flash(ids[:, :1], past_key_values=out.past_key_values, position_ids=torch.tensor([[4], [2]]))
    with pytest.raises(UsageError, match="position_ids must count"):
        flash(ids[:, :1], past_key_values=out.past_key_values, position_ids=torch.tensor([[5], [4]]))
    flash(ids, position_ids=torch.arange(4)[None])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, UsageError, "input_ids are missing"),
        ({"input_ids": [[5, 6]]}, TypeError, "must be a tensor, not a list"),
        ({"input_ids": torch.ones((1, 2))}, TypeError, "must be int64 or int32, not torch.float32"),
        ({"input_ids": torch.ones((1, 2), dtype=torch.bool)}, TypeError, "not torch.bool"),
        ({"input_ids": torch.tensor([5, 6])}, UsageError, r"must be \[batch, columns\].*not \[2\]"),
        ({"input_ids": torch.ones((1, 0), dtype=torch.long)}, UsageError, r"not \[1, 0\]"),
        ({"input_ids": torch.tensor([[5, 300]])}, UsageError, "token id 300 is not in the model's vocabulary of 300"),
        ({"input_ids": torch.tensor([[-100]])}, UsageError, "token id -100"),
        ({"inputs_embeds": torch.ones((1, 2, 64))}, UsageError, "inputs_embeds are not supported: give input_ids"),
        ({"attention_mask": torch.ones((1, 3))}, UsageError, r"must be \[1, 4\], for 0 columns .* not \[1, 3\]"),
        ({"attention_mask": torch.ones((1, 1, 4, 4))}, UsageError, r"must be \[1, 4\]"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1]])}, UsageError, "there is padding between a row's tokens"),
        ({"position_ids": torch.tensor([[1, 2, 3, 4]])}, UsageError, "leave them out"),
        ({"position_ids": torch.tensor([0, 1, 2, 3])}, UsageError, "leave them out"),
        ({"position_ids": torch.tensor([[0, 1, 2]])}, UsageError, "leave them out"),
        ({"output_attentions": True}, UsageError, "take them from the original"),
        ({"output_hidden_states": True}, UsageError, "take them from the original"),
        ({"labels": torch.ones((1, 3), dtype=torch.long)}, UsageError, r"labels must be \[1, 4\]"),
        ({"labels": torch.ones((1, 4), dtype=torch.long), "logits_to_keep": 1}, UsageError, "leave logits_to_keep out"),
        ({"token_type_ids": torch.zeros((1, 4))}, TypeError, "token_type_ids"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be(flash, arguments, error, message):
    if arguments and not {"input_ids", "inputs_embeds"} & set(arguments):
        arguments = {"input_ids": ids_of(4), **arguments}
    with pytest.raises(error, match=message):
        flash(**arguments)
    assert flash(ids_of(4)).logits.isfinite().all()


def test_labels_are_checked_before_anything_is_computed(flash):
    cache = flash.new_cache()
    with pytest.raises(UsageError, match="labels must be"):
        flash(ids_of(4), labels=ids_of(5), past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_a_mask_that_contradicts_the_cache(flash):
    ids = ids_of(4)
    cache = flash(ids).past_key_values
    with pytest.raises(UsageError, match="differs from the one"):
        flash(ids[:, :1], past_key_values=cache, attention_mask=torch.tensor([[0, 1, 1, 1, 1]]))
    cache = flash(ids, attention_mask=torch.tensor([[1, 1, 0, 0]])).past_key_values
    with pytest.raises(UsageError, match="there is padding between a row's tokens"):
        flash(ids[:, :1], past_key_values=cache, attention_mask=torch.tensor([[1, 1, 0, 0, 1]]))
    with pytest.raises(UsageError, match="padding between a row's tokens"):
        flash(ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize("option", ["output_attentions", "output_hidden_states"])
def test_generate_gives_out_no_states(flash, option):
    with pytest.raises(UsageError, match="take them from the original"):
        flash.generate(ids_of(4), max_new_tokens=2, return_dict_in_generate=True, **{option: True})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model, path: model.to("cuda"), "runs on the processor and cannot go to cuda.*device='cpu'"),
        (lambda model, path: model.cuda(), "cannot go to cuda"),
        (lambda model, path: model.to("meta"), "cannot go to meta"),
        (lambda model, path: model.to_empty(device="meta"), "cannot go to meta"),
        (lambda model, path: model.to(torch.bfloat16), "are float32 on flash and cannot become bfloat16"),
        (lambda model, path: model.to("cpu", torch.float16), "cannot become float16"),
        (lambda model, path: model.half(), "cannot become float16"),
        (lambda model, path: model.bfloat16(), "cannot become bfloat16"),
        (lambda model, path: model.double(), "cannot become float64"),
        (lambda model, path: model.train(), "cannot be trained; train the original"),
        (lambda model, path: model.requires_grad_(), "has no gradients; train the original"),
        (lambda model, path: model.save_pretrained(path), "is the model, copy that.*is not offered"),
        (lambda model, path: model.push_to_hub("name"), "is the model, copy that"),
        (lambda model, path: model.state_dict(), "no torch weights to save"),
        (lambda model, path: model.load_state_dict({}), "cannot be loaded into this model"),
        (lambda model, path: model.resize_token_embeddings(400), "the vocabulary is fixed"),
        (lambda model, path: model.get_input_embeddings(), "its embedding is the engine's"),
        (lambda model, path: model.set_input_embeddings(None), "its embedding is the engine's"),
        (lambda model, path: model.set_output_embeddings(None), "its head is the engine's"),
        (lambda model, path: model.get_output_embeddings(), "its head is the engine's"),
        (lambda model, path: model.generate_batch([[5, 6]]), "call generate with a padded batch"),
        (lambda model, path: model.init_continuous_batching(), "call generate with a padded batch"),
        (lambda model, path: model.generate(ids_of(4), assistant_early_exit=1), "goes through all layers"),
        (lambda model, path: copy.deepcopy(model), "cannot be copied or pickled"),
        (lambda model, path: FlashModel.from_pretrained(path, device_map="auto"), "knows no 'device_map'.*memory"),
        (lambda model, path: FlashModel.from_pretrained(path, speculate="lookup"), "give generate an assistant_model"),
    ],
)
def test_what_cannot_be_done_says_what_to_do(flash, tmp_path, call, message):
    with pytest.raises(UsageError, match=message):
        call(flash, tmp_path)
    assert not list(tmp_path.iterdir())
    assert flash(ids_of(4)).logits.isfinite().all()


def test_what_changes_nothing_is_allowed(flash):
    for same in (
        flash.to("cpu"),
        flash.to(torch.float32),
        flash.float(),
        flash.cpu(),
        flash.eval(),
        flash.train(False),
    ):
        assert same is flash
    assert flash.requires_grad_(False) is flash
    flash.tie_weights()


def test_options_come_as_a_config_or_one_by_one(tiny):
    path, config = tiny().path("all"), RunConfig(threads=1, io_threads=3, window=2)
    with FlashModel.from_pretrained(path, config=config, window=4, memory="6GB", store=str(path)) as flash:
        assert flash.engine.config.memory == 6 * 10**9
        assert (flash.engine.config.io_threads, flash.engine.config.window, flash.engine.config.store) == (3, 4, path)
    with pytest.raises(UsageError, match="the model is closed"):
        flash.engine.new_sequence()
    flash.close()
