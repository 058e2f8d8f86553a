"""From result lines to tables, pictures and sentences, with the paper's figures beside ours."""
