"""Train Keras models on TensorFlow in a fraction of the activation memory, with the same gradients.

```python
model.compile(optimizer=tf_echo.EchoOptimizer("adam"), loss="mse")     # the only change
```
"""

from tf_echo.cost_model import CostModel, MeasuredCost, RooflineCost, UnitCost
from tf_echo.explain import explain
from tf_echo.graph_view import GraphView, parse_view
from tf_echo.measuring import measure_costs
from tf_echo.optimizer import EchoOptimizer
from tf_echo.plan import PeakMemory, RecomputePlan, RegionDecision
from tf_echo.report import report
from tf_echo.training import EchoWarning
from tf_echo.verify import Verification, verify

__all__ = [
    "CostModel",
    "EchoOptimizer",
    "EchoWarning",
    "GraphView",
    "MeasuredCost",
    "PeakMemory",
    "RecomputePlan",
    "RegionDecision",
    "RooflineCost",
    "UnitCost",
    "Verification",
    "explain",
    "measure_costs",
    "parse_view",
    "report",
    "verify",
]

__version__ = "0.1.0"
