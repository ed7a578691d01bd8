"""Let the output head tell of each row what sampling would read all of it for.

To find the likeliest token of 152k, or the sum of their weights, takes a pass over logits that are
in no near cache any more: for 32 rows of the 0.5B shape it was a thirtieth of a step. The product
that makes them has each part of a row in the nearest cache for a moment. So `onnxport.MatMulNBits`
summarizes it there, as a graph input asks for each row. For devices whose operator library can,
after `use_coarse_head`.
"""

from __future__ import annotations

from typing import Final

import onnx
from onnx import TensorProto

from onnxport.graphs import contract
from onnxport.graphs.inspect import attribute_int, names, set_input
from onnxport.graphs.passes.coarse_head import head_of, rows_of_logits
from onnxport.graphs.passes.result import PassResult, copy_model

_SCALES: Final = 7  # the input's place, behind exact
_SUMMARIES: Final = 3  # the output's, behind what was normalized


def summarize_logits(model: onnx.ModelProto) -> PassResult:
    """Give the product that makes the logits, and the graph, SUMMARY_SCALES and LOGITS_SUMMARIES.

    That is done for LEAST_OUTPUTS or more.
    """
    copy = copy_model(model)
    rows, node = rows_of_logits(copy), head_of(copy)
    if rows is None or node is None or contract.SUMMARY_SCALES in names(copy):
        return PassResult("logits_summaries", copy, {})
    set_input(node, _SCALES, contract.SUMMARY_SCALES)
    node.output.extend([""] * (_SUMMARIES - len(node.output)) + [contract.LOGITS_SUMMARIES])
    floats = contract.summary_floats(attribute_int(node, "N", 0))
    info, kind = onnx.helper.make_tensor_value_info, TensorProto.FLOAT
    copy.graph.input.append(info(contract.SUMMARY_SCALES, kind, [rows]))
    copy.graph.output.append(info(contract.LOGITS_SUMMARIES, kind, [rows, floats]))
    return PassResult("logits_summaries", copy, {"heads that summarize the logits": 1})
