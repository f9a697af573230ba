"""The form of what goes between a process and the one that renders its chat templates.

A frame is its length in `LENGTH_NBYTES` bytes, the least first, then a request in JSON, or a kind's letter and a text.
"""

from enum import StrEnum

LENGTH_NBYTES = 8
MEMORY_STATUS = 3  # with which the renderer's process ends where its memory does not suffice


class Kind(StrEnum):
    """Kinds of an answer's text."""

    READY = "!"  # none: requests may come
    TEXT = "T"  # the conversation's
    REFUSED = "R"  # why the template refuses the conversation, in its own words
    FAILED = "F"  # why the template failed
    INVALID = "I"  # why the template is none
