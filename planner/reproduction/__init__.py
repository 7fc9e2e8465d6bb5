"""The papers' evaluation again, in the simulator: experiments, cells, rows.

experiments   what is compared, from YAML files
cells         one cluster, model and length of an experiment: what is computed at once
contenders    layouts of ours and of every baseline
judge         the simulator, which says who is fastest
comparison    ours against baselines; `ablations`, `optimality` and `planning` are the others
runner        cells side by side, their results kept in a file
statistics    means over cells
"""
