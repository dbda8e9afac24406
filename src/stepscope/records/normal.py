"""How many standard deviations, on either side of its mean, hold a share of a normal distribution.

A table, because the standard library's `statistics` imports random and decimal.
"""

NORMAL_90 = 1.645
NORMAL_95 = 1.96
NORMAL_95_PRECISE = 1.959964  # for comparing runs: scipy's to six digits
NORMAL_MAD = 1.4826  # of a distribution whose median absolute deviation is one
