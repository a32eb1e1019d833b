"""Does the simulator tell how long a step takes, stage by stage? Probes, simulates, trains, and compares.

    cd benchmarks && python -m sim_check [--quick] [--only "PART OF A NAME;..."]

Probes disk and memory once, counts the ids of every configuration, simulates its loop (holdfast_lab.sim.here), and
trains it with the systems of ``larger``, each in a process of its own. Writes report.md, results.json and stages.png.
``python -m sim_check.join`` puts parts (``--only``) together.
Exit status 1 where a step is off by more than 25%, or the mean is by more than 10%, with a line for each.
"""

from __future__ import annotations

import argparse

from larger.one import prepare_process

THREADS = 2
_QUICK_CONFIGURATIONS = ("in place, kaggle", "in place, rm1", "scratchpad of 4%", "window of")


def main() -> None:
    # What is predicted here is measured in processes that are prepared likewise.
    prepare_process(THREADS)
    from placement_check.comparison import add_arguments, choose, compare, finish, report_directory, write_record
    from sim_check.configurations import CONFIGURATIONS
    from sim_check.outcome import complaint_of_all, outcome_of
    from sim_check.report import write_report

    parser = argparse.ArgumentParser(
        prog="python -m sim_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    arguments = parser.parse_args()
    chosen = choose(CONFIGURATIONS, arguments, _QUICK_CONFIGURATIONS)
    outcomes, record = compare(
        chosen,
        arguments,
        lambda configuration, inputs, measured, others_cpus: outcome_of(
            configuration, inputs, measured, others_cpus, threads=THREADS
        ),
    )
    record["others_cpus"] = {each.name: each.others_cpus for each in outcomes}
    directory = report_directory(arguments, "predictions/sim-check")
    write_record(record, {each.name: each.prediction for each in outcomes}, directory)
    write_report(outcomes, record, directory)
    finish(outcomes, directory, *complaint_of_all(outcomes))


if __name__ == "__main__":
    main()
