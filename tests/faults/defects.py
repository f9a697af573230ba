"""The defects that attacks found, and the tests that fail on what was then: eleven at commit 334b180 (`DEFECTS`), and
those of a later attack at commit 65fd844 (`THIRD`).

A test is "file::function", below tests/. `tests/faults/test_defects.py` holds that each exists; the table of faults
(bench/faults/table.py) runs them.
"""

from dataclasses import dataclass

FILE = "faults/test_defects.py"


@dataclass(frozen=True, slots=True)
class Defect:
    """What was wrong, and the tests of it."""

    was: str
    tests: tuple[str, ...]


DEFECTS = {
    1: Defect(
        "one model used from two threads: a fault, or wrong logits",
        (
            "hf/test_strategies.py::test_threads_generate_at_once",
            "hf/test_cache.py::test_what_is_no_cache_of_this_model_is_refused",
        ),
    ),
    2: Defect(
        "damaged resident weights, predictors or tokenizer: other tokens without a word; NaN: token 0 for ever",
        (
            f"{FILE}::test_2_a_flipped_byte_of_any_file_is_noticed",
            "engine/test_resident.py::test_a_flipped_bit",
            "engine/test_step.py::test_numbers_that_are_not_finite_name_their_layer",
        ),
    ),
    3: Defect(
        "a forked child that uses the model, and m.to('meta'): a fault",
        (
            "engine/test_fork.py::test_the_latency_engine",
            "engine/test_fork.py::test_the_throughput_engine",
            "hf/test_fixed.py::test_what_cannot_be_done_says_what_to_do",
        ),
    ),
    4: Defect(
        "one failing stat of tokenizer.json: another tokenizer",
        (f"{FILE}::test_4_a_stat_that_fails_is_an_error_or_changes_nothing",),
    ),
    5: Defect(
        "save_pretrained, new weights and embeddings were taken and answered garbage",
        ("hf/test_fixed.py::test_what_cannot_be_done_says_what_to_do",),
    ),
    6: Defect(
        "the minimum that plan names was refused by generate",
        (
            f"{FILE}::test_6_generate_accepts_the_minimum_that_plan_names",
            "hf/test_model.py::test_the_least_memory_is_the_one_that_is_named",
        ),
    ),
    7: Defect(
        "libraries saw configs and tokenizers first: 'a bug in flashllm', no file named",
        (
            f"{FILE}::test_7_a_malformed_checkpoint_names_its_file",
            f"{FILE}::test_7_a_malformed_model_directory_names_its_file",
        ),
    ),
    8: Defect(
        "small files that cost minutes and gigabytes",
        (f"{FILE}::test_8_small_files_cost_little", "base/test_files.py::test_json_is_strict"),
    ),
    9: Defect("the terminal stayed raw after signals", ("chat/test_signals.py::test_a_signal_that_ends_the_chat",)),
    10: Defect(
        "/save ~nouser/x ended the chat",
        (f"{FILE}::test_10_no_name_ends_a_chat", "chat/test_chat.py::test_export_writes_once_and_never_over"),
    ),
    11: Defect(
        "smaller: probes, rings, sizes, names, ids, types, closed models, links, streams",
        (
            "io/test_reader.py::test_an_interrupted_first_read_is_repeated",
            "io/test_reader.py::test_a_ring_that_takes_no_reads",
            "commands/test_cli.py::test_wrong_use_is_one_line_and_status_2",
            "commands/test_cli.py::test_streams_that_are_closed_or_full",
            f"{FILE}::test_11_names_that_no_file_can_have",
            "hf/test_strategies.py::test_beyond_the_context",
            "hf/test_fixed.py::test_arguments_that_cannot_be",
            "test_config.py::test_what_cannot_be_is_refused",
            f"{FILE}::test_11_a_model_closed_while_another_thread_generates",
            f"{FILE}::test_11_companions_that_are_links_out_of_the_folder",
            f"{FILE}::test_11_a_full_stderr",
            "hf/test_strategies.py::test_assisted_by_another_model",
            "hf/test_fixed.py::test_generate_gives_out_no_states",
            "format/test_manifest.py::test_any_other_change_is_noticed",
        ),
    ),
}

THIRD = {
    "1": Defect(
        "tokenising took a hundred times a prompt's bytes, planned nowhere: one request, or one line of a batch, and "
        "the process was killed; others waited for it",
        (
            "api/test_text_pieces.py::test_the_ids_are_the_wholes",
            "api/test_text_pieces.py::test_words_longer_than_pieces",
            "api/test_text_pieces.py::test_it_stops_past_what_is_wanted",
            "serve/test_bounds.py::test_a_prompt_that_cannot_fit_is_not_tokenised",
            "serve/test_bounds.py::test_others_are_answered_while_a_prompt_is_tokenised_and_it_ends_with_its_client",
            "serve/test_bounds.py::test_a_text_that_is_wide_in_memory_is_too_much",
            "plan/test_budget.py::test_a_servers_requests_are_in_the_plan",
            f"{FILE}::test_third_1_a_long_line_of_a_batch_costs_little",
        ),
    ),
    "2": Defect(
        "bodies under way were not bounded together",
        (
            "serve/test_bounds.py::test_bodies_have_one_bound_together",
            "serve/test_bounds.py::test_many_small_bodies_at_once_have_room",
        ),
    ),
    "3": Defect(
        "a chat template froze or killed the process: texts that double, wide integers, huge widths, blocks",
        (
            "generate/test_templates_apart.py::test_a_bomb_renders_small_or_is_an_error",
            "generate/test_templates_apart.py::test_the_limits_as_they_are",
            "serve/test_server.py::test_a_bomb_stops_nothing_a_signal_ends_all_and_requests_are_not_logged",
        ),
    ),
    "4": Defect(
        "connections without headers stayed, and took every descriptor; the log filled",
        (
            "serve/test_bounds.py::test_connections_that_send_no_request_end",
            "serve/test_bounds.py::test_a_new_connection_takes_the_place_of_one_that_waits",
            "serve/test_bounds.py::test_more_connections_than_descriptors",
            "serve/test_bounds.py::test_what_cannot_be_accepted_is_said_once_and_tried_later",
        ),
    ),
    "5": Defect(
        "a killed server's half written conversations stayed in the folder, uncounted",
        (
            "parked/test_parked.py::test_what_a_killed_server_was_writing",
            "parked/test_parked.py::test_the_name_of_what_is_being_written",
        ),
    ),
    "6": Defect(
        "GGUF metadata that ended in 'a bug in flashllm', or in a model that could not be loaded",
        (
            "convert/test_gguf.py::test_what_makes_no_sense_is_said",
            "convert/test_gguf_layout.py::test_numbers_of_parts_that_are_none",
            "convert/test_gguf_tokenizer.py::test_what_a_model_directory_could_not_load",
            "faults/test_metadata.py::test_any_value_of_any_key_ends_in_a_sentence_or_an_answer",
        ),
    ),
    "7": Defect(
        "a large vocabulary of control or user-defined tokens did not convert in a minute",
        ("convert/test_gguf_tokenizer.py::test_large_vocabularies_of_any_type",),
    ),
    "8": Defect(
        "GGUF tensors that overlap, or are of a kind that they cannot have: other tokens without a word",
        (
            "convert/test_gguf_layout.py::test_a_tensor_that_lies_or_is_as_none_may",
            "convert/test_gguf_layout.py::test_all_at_one_place",
            "convert/test_gguf_layout.py::test_quantised_norms_of_heads_and_biases_of_experts",
            "convert/test_gguf_layout.py::test_every_part_of_a_split_model",
            "convert/test_gguf_layout.py::test_an_alignment_that_is_none",
            "convert/test_gguf_layout.py::test_bytes_behind_the_last_tensor",
        ),
    ),
    "8b": Defect("half a character as the name of a field: 500", ("serve/test_requests.py::test_bad_fields",)),
    "9": Defect("a key of NUL bytes was taken", ("serve/test_server.py::test_keys_that_could_be_guessed_are_refused",)),
    "10": Defect(
        "the web server's lines came without a limit, and advised to install packages",
        ("serve/test_bounds.py::test_the_web_servers_lines_are_few_and_ours",),
    ),
    "11": Defect(
        "offload run --resume believed the lines' ids alone",
        ("offload/jobs/test_results.py::test_a_line_that_was_changed_is_no_answer",),
    ),
    "12": Defect(
        "413 that a client could not read; encodings that were ignored",
        (
            "serve/test_bounds.py::test_a_client_that_still_sends_hears_that_it_is_too_much",
            "serve/test_bounds.py::test_encodings_that_are_not_understood",
        ),
    ),
}
