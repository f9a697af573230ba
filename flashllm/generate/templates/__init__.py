"""Chat templates, which are strangers' programs: a process apart renders them, with limits."""
