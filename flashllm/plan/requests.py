"""Memory that prompts and a server's requests take before their tokens are computed, and the bounds that hold them."""

# What a text of any length takes while it becomes tokens: two pieces of api/pieces.py, of characters of 4 bytes.
PROMPT_NBYTES = 6_000_000
CONNECTIONS = 256  # to a server at once
_CONNECTION_NBYTES = 24_000  # of one: its objects, and what is read from it before a request is begun
_BODY_SHARE = 128  # bytes of a request's body for each position of the context, as far as the bounds allow
_BODY_BOUNDS = 1 << 20, 8 << 20
_BODY_VALUES, _VALUE_NBYTES = 1 << 15, 120  # of JSON, besides the prompt's tokens; memory of one
BODIES = 3  # times the largest body: what all under way may take; two times the largest come and go while it is read


def body_nbytes(context: int) -> int:
    """The largest body of a request to a model of this context."""
    least, most = _BODY_BOUNDS
    return min(max(_BODY_SHARE * context, least), most)


def body_values(context: int) -> int:
    """JSON values that a body may hold."""
    return _BODY_VALUES + context


def requests_nbytes(context: int) -> int:
    """Bytes that a server's requests take at most, before their tokens are computed."""
    bodies = (BODIES + 2) * body_nbytes(context) + _VALUE_NBYTES * body_values(context)
    return bodies + CONNECTIONS * _CONNECTION_NBYTES
