"""A sample of what `metadata.py` tries whole."""

from metadata import main


def test_any_value_of_any_key_ends_in_a_sentence_or_an_answer(capfd):
    status = main(["--only", "llama", "pieces", "falcon", "--sample", "80"])
    assert status == 0, capfd.readouterr().err
