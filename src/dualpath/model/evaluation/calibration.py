"""Two readings of Table 3, each with the parameters fitted under it.

Table 3 does not say at which length 2K agents take 3,167 s.  §7.5, just before it, works at 64K;
online numbers speak for 48K.  Kernels' efficiencies, storage and CNIC are fitted anew under the
second reading; everything else is the same.
"""

from typing import Any, Literal

import msgspec

Reading = Literal["64K", "48K"]


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters in place of the catalog's.

    ``table3_length`` is the dataset of the offline rows of Table 3 and Fig. 15.
    ``prefill_efficiency`` is by name of the model, ``cluster`` fields of ``ClusterSettings`` of
    every cluster.  ``fitted`` says what was fitted to which numbers, for the reader.
    """

    table3_length: Reading
    prefill_efficiency: tuple[tuple[str, float], ...] = ()
    cluster: tuple[tuple[str, Any], ...] = ()
    fitted: str


AS_WRITTEN = Calibration(
    table3_length="64K",
    fitted="""\
- kernel rates of prefill (one common factor), the overhead of a forward pass (0.12 s), the batch
  cap where there is no quota (1,536 tokens) and what a CNIC gives to layer blocks (39 GB/s): to the
  JCT, the largest speed-up and the three ablation steps of DS 660B on 2P4D at 64K;
- the efficiency of DS 27B's kernels beside DS 660B's (0.36): to its largest speed-up in Fig. 7;
- the time from KV in HBM to the first decode step (0.135 s) and the cost of one more request in a
  step: to TTST and TPOT of Table 3.
""",
)

AT_48K = Calibration(
    table3_length="48K",
    prefill_efficiency=(("ds-v3.2", 0.625), ("ds-27b", 0.16)),
    cluster=(
        ("snic_bytes_per_s", 32e9),
        ("snic_write_bytes_per_s", 32e9),
        ("cnic_bytes_per_s", 23.5e9),
    ),
    fitted="""\
- the efficiency of the kernels of DS 660B (0.625 of the rates above): to 3,167 s at 48K;
- what storage NICs give (32 of 50 GB/s): to DS 660B's largest speed-up;
- what a CNIC gives to layer blocks (23.5 GB/s): to the three ablation steps;
- the efficiency of DS 27B's kernels (0.16): to its largest speed-up in Fig. 7.

TTST and TPOT are not fitted again, so that in this column they are predictions.
""",
)
