"""Does it fit, and what goes where? What training asks of memory, what memories do, and the integer program between.

access_profile: which rows are used, and how often · ladder: the same as a curve · demand: what a batch asks for ·
tiers: what memories do, measured by probe · program: the model and its solver · plan: the answer, for people.

How long does a step take? reuse: how soon rows come again · host: what rows cost a CPU, measured by row_probe ·
network_time: what the network takes here · step_time: the model · step_plan: the answer.
"""
