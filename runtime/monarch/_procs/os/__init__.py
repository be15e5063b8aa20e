"""Thin wrappers over Linux: processes and their descendants, waits of threads, cores, GPUs, files and locks."""
