"""The zoo: drawn programs of torch, right and with a planted mistake, that judge the shadow."""
