"""The verbs for converted models that the user's cache keeps."""
