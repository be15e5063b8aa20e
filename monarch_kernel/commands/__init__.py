"""The commands of ``%mesh`` on meshes, ranks and files; those of a debugger are in ``debug``, of views in ``views``."""
