"""A run's configuration.

schema.py       the whole run, and the sections that are small
model.py · parallel.py · sft.py · adaptation.py · evaluation.py     sections with files of their own, and the rules
                between options
loading.py      YAML and key=value overrides, errors in one line
section.py      what all sections refuse
"""

from .schema import (
    Config,
    DataSection,
    DataSource,
    OptimizerSection,
    ScheduleSection,
    TokenizerSection,
    config_to_yaml,
    gradient_accumulation_steps,
    load_config,
    orthros_config,
)

__all__ = [
    "Config",
    "DataSection",
    "DataSource",
    "OptimizerSection",
    "ScheduleSection",
    "TokenizerSection",
    "config_to_yaml",
    "gradient_accumulation_steps",
    "load_config",
    "orthros_config",
]
