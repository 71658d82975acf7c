from __future__ import annotations

from typing import Any

import pytest

from nbtoolkit.config.aliases import MEANINGS, REFUSALS
from nbtoolkit.config.fields import allowed_values
from nbtoolkit.config.schema import Config, load_config
from nbtoolkit.errors import ConfigError


def _load(**sections: Any) -> Config:
    return load_config(env=None, overrides=sections)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"distributed": {"grad_accumulation": 4}}, {"train.gradient_accumulation_steps": 4}),
        ({"distributed": {"grad_accum_steps": 4}}, {"train.gradient_accumulation_steps": 4}),
        ({"train": {"gradient_accumulation_steps": 4}}, {"train.gradient_accumulation_steps": 4}),
        ({"distributed": {"sync_bn": True}}, {"distributed.sync_batchnorm": True}),
        ({"distributed": {"num_gpus": 2}}, {"distributed.world_size": 2}),
        ({"distributed": {"mode": "DISTRIBUTED"}}, {"distributed.strategy": "ddp"}),
        ({"distributed": {"mode": "NONE"}}, {"distributed.strategy": "single"}),
        ({"distributed": {"mode": "AUTO"}}, {}),
        ({"distributed": {"mode": "DATAPARALLEL"}}, {"distributed.strategy": "dp"}),
        ({"multi_gpu_mode": "DataParallel"}, {"distributed.strategy": "dp"}),
        ({"distributed": {"strategy": "Data_Parallel"}}, {"distributed.strategy": "dp"}),
        ({"distributed": {"strategy": "none"}}, {"distributed.strategy": "single"}),
        ({"distributed": {"strategy": "Auto"}}, {}),
        ({"enable_multi_gpu": True}, {"distributed.enabled": True}),
        ({"multi_gpu_mode": "distributed"}, {"distributed.strategy": "ddp"}),
        ({"multi_gpu_device_ids": [0, 2]}, {"distributed.device_ids": [0, 2]}),
        ({"multi_gpu_bucket_cap_mb": 50}, {"distributed.bucket_cap_mb": 50.0}),
    ],
)
def test_other_launchers_names_are_understood(
    settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    differences = _load(**settings).differences(Config())
    changed = {name: mine for name, (mine, _) in differences.items() if mine is not None}
    assert changed == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"distributed": {"rank": 0}},
            r"'distributed.rank' is set by the launcher for each process",
        ),
        ({"local_rank": 0}, r"'local_rank' is set by the launcher"),
        ({"distributed": {"init_method": "tcp://a"}}, r"init_method' can only be env://"),
        (
            {"distributed": {"master_addr": "10.0.0.1"}},
            r"can only be localhost(.|\n)*torchrun or srun",
        ),
        ({"distributed": {"num_nodes": 2}}, r"num_nodes' can only be 1"),
        ({"distributed": {"launch_method": "torchrun"}}, r"is an argument of the call\n.*start="),
        ({"distributed": {"batch_size": 8}}, r"is ambiguous\n.*per_device"),
        ({"distributed": {"output_device": 0}}, r"belongs to DataParallel"),
        ({"train": {"deepspeed_config": "ds.json"}}, r"DeepSpeed's own file(.|\n)*zero_stage"),
        ({"train": {"zero_stage": 3}}, r"did you mean 'distributed.zero_stage'"),
        ({"distributed": {"enable_hybrid": True}}, r"divides the model(.|\n)*strategy: hybrid"),
        (
            {"distributed": {"backend": "mpi"}},
            r"'mpi' is not allowed: torch has it only when",
        ),
        (
            {"distributed": {"backend": "pytorch-ddp"}},
            r"not allowed: set distributed.strategy: ddp",
        ),
        ({"distributed": {"init_method": "env://"}}, r"can only be env://(.|\n)*remove it"),
        ({"train": {"fp16": True}}, r"setting 'train.fp16'(.|\n)*did you mean 'train.precision'"),
        (
            {"gradient_clipping": 1.0},
            r"'gradient_clipping'(.|\n)*mean 'train.max_grad_norm'",
        ),
        ({"distributed": {"backend": "horovod"}}, r"Horovod's last release"),
        ({"checkpoint": {"checkpoint_dir": "x"}}, r"cannot be set by itself\n.*runtime.output_dir"),
        ({"checkpoint": {"auto_resume": False}}, r"is an argument of the call\n.*resume=\"never\""),
        ({"max_retries": 3}, r"setting 'max_retries'(.|\n)*did you mean 'runtime.restarts'"),
        ({"k_fold": {"n_splits": 5}}, r"'k_fold' belongs to a sweep\n.*sweep's own file"),
        (
            {"distributed": {"sync_bn": True, "sync_batchnorm": False}},
            r"sets distributed.sync_batchnorm, which override 'distributed' sets\b(.|\n)*keep one",
        ),
    ],
)
def test_what_is_refused_is_refused_with_its_reason(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _load(**settings)


NAMES = {name: to for name, to in {**MEANINGS, **REFUSALS}.items() if ": " not in name}


def test_names_of_the_users_own_sections_are_left_alone() -> None:
    own = {name: 1 for name in NAMES if "." not in name}
    assert _load(model=own).model.to_dict() == own
    assert _load(optim={"options": own}).optim.options.to_dict() == own


def test_every_other_name_leads_to_a_setting_of_ours_or_to_a_way_out() -> None:
    known = allowed_values(Config)
    assert {to for name, to in MEANINGS.items() if ": " not in name} <= set(known)
    assert all(to in known or "; " in to for to in NAMES.values())
    assert not set(MEANINGS) & set(REFUSALS)


@pytest.mark.parametrize("name", [name for name in REFUSALS if "." not in name])
def test_a_name_or_value_that_is_refused_says_what_to_do(name: str) -> None:
    setting, _, value = name.partition(": ")
    settings = {f"distributed.{setting}": value} if value else {setting: 1}
    with pytest.raises(ConfigError) as caught:
        load_config(env=None, overrides=settings)
    assert REFUSALS[name].rpartition("; ")[2] in str(caught.value)
