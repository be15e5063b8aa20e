"""Arrow arrays, tensors and tables as NumPy arrays. Arrow itself is not imported here."""

from __future__ import annotations

from typing import Any

from monarch.exceptions import ArgumentError


def is_of_arrow(value: Any) -> bool:
    """Return whether a value is an object of pyarrow."""
    return type(value).__module__.partition(".")[0] == "pyarrow"


def array_of_arrow(value: Any) -> Any:
    """Return the numbers of an Arrow object.

    The columns of a table, or of a record batch, are the columns of the result. Lists of a fixed size and tensors of a
    fixed shape are further dims. Missing floating point numbers are NaN.

    Raises:
        ArgumentError: it has other values than numbers of one type, or some are missing.
    """
    if hasattr(value, "schema") and hasattr(value, "columns"):
        return _of_table(value)
    if not hasattr(value, "type") or not hasattr(value, "to_numpy"):
        raise ArgumentError(
            f"distribute: expected an Arrow array, tensor or table, got {type(value).__name__}; convert it "
            f"first, for example with read_all(), to_table() or as_py()"
        )
    if not hasattr(value, "null_count"):
        if hasattr(value, "non_zero_length"):
            raise ArgumentError(
                f"distribute: expected dense values, got {type(value).__name__}; convert it with to_tensor()"
            )
        return value.to_numpy()
    return _joined([_of_chunk(chunk, "") for chunk in _chunks(value)])


def _of_table(table: Any) -> Any:
    """Return the columns side by side, each copied once."""
    fields = list(table.schema)
    if not fields:
        raise ArgumentError("distribute: the table has no columns")
    kinds = {str(field.type): field.name for field in fields}
    if len(kinds) > 1:
        (kind, name), (other, second) = list(kinds.items())[:2]
        raise ArgumentError(
            f"distribute: expected columns of one type, got '{name}' of {kind} and '{second}' of {other}; convert them "
            f"with table.cast(), or choose some with table.select()"
        )
    array: Any = None
    for at, (field, column) in enumerate(zip(fields, table.columns, strict=True)):
        row = 0
        for chunk in _chunks(column):
            part = _of_chunk(chunk, f" in column '{field.name}'")
            if array is None:
                import numpy

                array = numpy.empty((table.num_rows, len(fields), *part.shape[1:]), part.dtype)
            array[row : row + len(part), at] = part
            row += len(part)
    return array


def _chunks(value: Any) -> list[Any]:
    """Return the arrays of a chunked array, one at least."""
    if not hasattr(value, "chunks"):
        return [value]
    return list(value.chunks) or [value.combine_chunks()]


def _joined(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    import numpy

    return numpy.concatenate(parts)


def _of_chunk(array: Any, where: str) -> Any:
    """Return the numbers of an array in one piece."""
    given, length = array.type, len(array)
    if hasattr(array, "to_numpy_ndarray"):
        _refuse_nulls(array, where)
        # Its storage may miss numbers inside of a row.
        _refuse_nulls(array.storage.flatten(), where)
        return array.to_numpy_ndarray()
    sizes: list[int] = []
    while hasattr(array.type, "list_size"):
        _refuse_nulls(array, where)
        sizes.append(int(array.type.list_size))
        array = array.flatten()
    if hasattr(array, "dictionary_decode"):
        array = array.dictionary_decode()
    kind = str(array.type)
    if kind == "null" or kind == "bool" or "int" in kind.split("<")[0]:
        _refuse_nulls(array, where)
    found = array.to_numpy(zero_copy_only=False)
    if found.dtype.kind not in "biufc":
        raise ArgumentError(
            f"distribute: expected Arrow numbers, got values of type {given}{where}; convert them with cast(), for "
            f"example lists of one length to pyarrow.list_(pyarrow.float32(), 2) and times to pyarrow.int64()"
        )
    return found.reshape(length, *sizes) if sizes else found


def _refuse_nulls(array: Any, where: str) -> None:
    if array.null_count:
        raise ArgumentError(
            f"distribute: {array.null_count} values of type {array.type} are missing{where}; fill them with "
            f"fill_null(), or leave them out with drop_null()"
        )
