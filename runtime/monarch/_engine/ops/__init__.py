"""Ops that DTensor lacks or runs wrongly: other ops compute them, or they get rules here."""
