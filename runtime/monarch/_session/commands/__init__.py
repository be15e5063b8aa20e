"""Commands, shells, forwarded ports and files on hosts, for programs and for the ``monarch`` command."""
