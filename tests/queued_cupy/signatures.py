"""The names of CuPy that the stand-in has, with the parameters that they take in CuPy 13 and 14.

A name that is not here does not exist: look it up in CuPy before adding it.
"""

#: Functions, by their parameters in order; those behind ``*`` by keyword alone.
FUNCTIONS = {
    "arange": "start stop step dtype",
    "array": "obj dtype copy order subok ndmin * blocking",
    "asarray": "a dtype order * blocking",
    "ascontiguousarray": "a dtype",
    "asnumpy": "a stream order out * blocking",
    "bincount": "x weights minlength",
    "broadcast_to": "array shape",
    "clip": "a a_min a_max out",
    "concatenate": "tup axis out * dtype casting",
    "copyto": "dst src casting where",
    "empty": "shape dtype order",
    "empty_like": "prototype dtype order subok shape",
    "from_dlpack": "array",
    "full": "shape fill_value dtype order",
    "moveaxis": "a source destination",
    "nonzero": "a",
    "ones": "shape dtype order",
    "pad": "array pad_width mode",
    "split": "ary indices_or_sections axis",
    "stack": "tup axis out * dtype casting",
    "sum": "a axis dtype out keepdims",
    "triu": "m k",
    "where": "condition x y",
    "zeros": "shape dtype order",
    "zeros_like": "a dtype order subok shape",
}

#: Element-wise functions: ``(*inputs, out=None, dtype=None, casting=...)``.
UFUNCS = """
    absolute add bitwise_and bitwise_or bitwise_xor cos divide equal exp floor_divide greater
    greater_equal invert isfinite isnan less less_equal log log1p logical_and logical_not
    logical_or logical_xor maximum minimum multiply negative not_equal power remainder sqrt
    square subtract tanh true_divide
"""

#: Methods of arrays, by their parameters in order.
METHODS = {
    "all": "axis out keepdims",
    "any": "axis out keepdims",
    "argmax": "axis out dtype keepdims",
    "astype": "dtype order casting subok copy",
    "copy": "order",
    "cumsum": "axis dtype out",
    "max": "axis out keepdims",
    "mean": "axis dtype out keepdims",
    "min": "axis out keepdims",
    "ravel": "order",
    "reshape": "*shape order",
    "sum": "axis dtype out keepdims",
    "swapaxes": "axis1 axis2",
    "transpose": "*axes",
    "view": "dtype type",
}

#: Types and constants, which are NumPy's.
SHARED = """
    bool_ dtype e float16 float32 float64 inf int8 int16 int32 int64 intp nan newaxis pi
    uint8 uint16 uint32 uint64 finfo iinfo
"""


def check(where, text, given, named):
    """``TypeError`` where CuPy has no such parameter."""
    positions, _, keywords = text.partition("* ")
    by_position = [name.removeprefix("*") for name in positions.split()]
    known = by_position + keywords.split()
    for name in named:
        if name not in known:
            raise TypeError(
                f"cupy.{where}() got an unexpected keyword argument {name!r}; CuPy has {known}"
            )
    if len(given) > len(by_position) and "*" not in positions:
        raise TypeError(f"cupy.{where}() takes {len(by_position)} arguments, not {len(given)}")
