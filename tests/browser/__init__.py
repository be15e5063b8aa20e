"""Tests in a real browser; a package, so that fixtures end with its last test."""
