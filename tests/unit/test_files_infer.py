"""Types that are guessed from texts hold them exactly."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.source.files_describe_json import guess_type
from lockstep.source.files_infer import infer


@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        (["1", "-2", "0"], "long"),
        (["1", None], "long"),
        ([None, None], "string"),
        ([], "string"),
        (["9223372036854775807"], "long"),
        (["9223372036854775808"], "string"),
        (["007"], "string"),
        (["+1"], "string"),
        (["0x10"], "string"),
        (["1", "1.5"], "double"),
        (["1e5", "nan", "-inf"], "double"),
        (["nan"], "string"),
        (["1e999"], "string"),
        (["1.5", "12345678901234567"], "string"),
        (["12345678901234567.89"], "string"),
        (["99999999999999999.99", "1.5"], "string"),
        (["1e-400"], "string"),
        (["1e-99999999999999999999999"], "string"),
        (["0.10000000000000001"], "string"),
        (["0.1", "123456789012.345", "-0.0", "1.", "1E+3"], "double"),
        (["0.30000000000000004", "1.7976931348623157e308", "5e-324"], "double"),
        (["1.500000000000000000000", "1e22"], "double"),
        (["true", "False"], "boolean"),
        (["1", "true"], "string"),
        (["2024-02-29"], "date"),
        (["2024-02-30"], "string"),
        (["2024-02-29 12:00", "2024-02-29T12:00:00.123456"], "timestamp"),
        (["2024-02-29 12:00:00.1234567"], "string"),
        (["2024-02-29T12:00:00Z", "2024-02-29 12:00:00+01:00"], "timestamptz"),
        (["2024-02-29T12:00:00Z", "2024-02-29 12:00:00"], "string"),
        (["2024-02-29", "2024-02-29 12:00:00"], "string"),
        ([""], "string"),
        ([" 1"], "string"),
    ],
)
def test_a_guess_is_the_narrowest_type_that_holds_every_text(texts, kind):
    assert infer(pa.array(texts, pa.string())) == kind


@given(
    st.lists(
        st.one_of(st.integers(), st.floats(), st.decimals(), st.datetimes(), st.dates(), st.text()).map(str),
        min_size=1,
    )
)
def test_a_guessed_type_never_changes_a_value(texts):
    kind = infer(pa.array([text.encode("utf-8", "replace").decode() for text in texts], pa.string()))
    if kind == "long":
        assert all(str(int(text)) == text or text == "-0" for text in texts)
    if kind == "double":
        assert all("n" in text.lower() or Decimal(repr(float(text))) == Decimal(text) for text in texts)
    if kind == "timestamp":
        assert all(datetime.fromisoformat(text) for text in texts)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, None], "long"),
        ([1, Decimal("1.5")], "double"),
        ([2**63], None),
        ([2**60, Decimal("0.5")], None),
        ([Decimal("12345678901234567.89")], None),
        ([Decimal("1e-400")], None),
        ([Decimal("0.30000000000000004"), float("nan")], "double"),
        ([True], "boolean"),
        ([True, 1], None),
        (["2024-02-29"], "date"),
        (["1"], "string"),
        ([None], "string"),
        ([{}], None),
        ([[1], []], {"type": "list", "element-id": 0, "element-required": False, "element": "long"}),
        ([[1, "x"]], None),
    ],
)
def test_json_values_of_one_kind_have_a_type_and_others_none(values, kind):
    assert guess_type(values).type == kind
    assert (guess_type(values).problem is None) == (kind is not None)
