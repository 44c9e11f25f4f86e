from dataclasses import dataclass, field


@dataclass
class ModuleSpec:
    module: object
    params: dict = field(default_factory=dict)
    submodules: object = None
