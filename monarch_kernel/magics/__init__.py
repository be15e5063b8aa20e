"""The ``%mesh`` and ``%%mesh`` magics: they connect the rooms below, and complete what is typed."""
