"""Convert weights between this package and other implementations; ``docs/conversion.md`` has the table of layouts."""

from diff_transformer.model.convert.folder import LAYOUTS as LAYOUTS
from diff_transformer.model.convert.folder import convert_folder as convert_folder
from diff_transformer.model.convert.folder import convert_model as convert_model
from diff_transformer.model.convert.unilm import attention_from_unilm as attention_from_unilm
