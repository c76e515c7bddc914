"""Forward passes: KV between DRAM and HBM, layer by layer, and generated blocks out of HBM."""
