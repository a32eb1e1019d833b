"""Does `holdfast plan` tell how long a step takes? Predicts steps, trains them, and compares.

    cd benchmarks && python -m placement_check [--quick] [--only "PART OF A NAME;..."]

Probes disk and memory once, counts the ids of every configuration, predicts its step, and trains it with the systems of
``larger``, each in a process of its own. Writes report.md and results.json. Exit status 1 where a prediction is off by
more than a quarter, with a line that says which. Six minutes, four with --quick (shorter windows, six configurations).
"""

from __future__ import annotations

import argparse

from larger.one import prepare_process

THREADS = 2
_QUICK_CONFIGURATIONS = ("in place", "log store, kaggle, scratchpad", "log store, kaggle, a fifth", "uniform ids")


def main() -> None:
    # What is predicted here is measured in processes that are prepared likewise.
    prepare_process(THREADS)
    from placement_check.comparison import add_arguments, choose, compare, finish, report_directory, write_record
    from placement_check.configurations import CONFIGURATIONS
    from placement_check.report import outcome_of, write_report

    parser = argparse.ArgumentParser(
        prog="python -m placement_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    arguments = parser.parse_args()
    chosen = choose(CONFIGURATIONS, arguments, _QUICK_CONFIGURATIONS)
    outcomes, record = compare(chosen, arguments, outcome_of)
    directory = report_directory(arguments, "predictions/placement")
    write_record(record, {each.name: each.predicted for each in outcomes}, directory)
    write_report(outcomes, record["machine"], directory)
    finish(outcomes, directory)


if __name__ == "__main__":
    main()
