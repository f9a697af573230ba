"""A loaded model: memory, files and threads, over the native core."""
