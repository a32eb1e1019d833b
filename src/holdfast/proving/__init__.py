"""``holdfast prove``: a user's script in fresh processes, killed and resumed, compared with itself bit for bit.

- hook: what the rest of holdfast calls; does nothing outside of a proof.
- witness, observation, surroundings: inside the script's process; see what each step left, and obey orders to die.
- record: what the witness writes and the command reads.
- life, campaign: one process, and all of them.
- comparison, verdict: where runs part, and what that means, in words.
"""
