from diff_transformer.cli import main

main()
