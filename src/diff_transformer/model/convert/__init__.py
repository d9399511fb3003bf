"""Convert weights between this package and other implementations; ``docs/conversion.md`` has the table of layouts."""

from diff_transformer.model.convert.diffllama import from_diffllama as from_diffllama
from diff_transformer.model.convert.diffllama import to_diffllama as to_diffllama
from diff_transformer.model.convert.folder import LAYOUTS as LAYOUTS
from diff_transformer.model.convert.folder import convert_folder as convert_folder
from diff_transformer.model.convert.from_softmax import softmax_to_diff as softmax_to_diff
from diff_transformer.model.convert.llama import from_llama as from_llama
from diff_transformer.model.convert.llama import to_llama as to_llama
from diff_transformer.model.convert.unilm import attention_from_unilm as attention_from_unilm
