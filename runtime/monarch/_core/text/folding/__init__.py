"""Folding of rank output: equal lines of several ranks become one."""
