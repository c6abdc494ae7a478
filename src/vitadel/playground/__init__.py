"""The playground: one image, one model, one attack, in the browser. Only `app` needs gradio."""
