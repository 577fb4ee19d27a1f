from training.trainer.data.spec import DataSpec, TokenizerSpec
