"""The ways of messages from and to many hosts: which of them go by others."""
