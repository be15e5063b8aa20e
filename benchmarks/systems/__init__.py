"""The systems that are compared, each behind the interface of ``systems.base``."""
