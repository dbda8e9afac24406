"""Which rank keeps a job from its next step, and where in the script it is."""

from stepscope.explain.hang.verdict import explain_hang as explain_hang
from stepscope.explain.hang.verdict import hang_now as hang_now
