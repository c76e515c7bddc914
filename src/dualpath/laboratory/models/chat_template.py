"""The chat template (ChatML) of the models made here.

For plain system, user and assistant messages it renders exactly what SmolLM2's own template
renders. That one fails on what agents send, so this one adds: messages without content, tool
calls (as JSON) and tool definitions (as JSON in the system message), so that agent prompts keep
their real length. Every message renders to text that no later message changes: turn k's prompt is
a prefix of turn k+1's, without which no KV-cache could be reused.
"""

DEFAULT_SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

CHAT_TEMPLATE = (
    r"{% set definitions = '\n\n<tools>' + (tools | tojson) + '</tools>' if tools else '' %}"
    r"{% for message in messages %}"
    r"{% if loop.first and message['role'] != 'system' %}"
    r"{{ '<|im_start|>system\n" + DEFAULT_SYSTEM_PROMPT + r"' + definitions + '<|im_end|>\n' }}"
    r"{% endif %}"
    r"{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}"
    r"{% if loop.first and message['role'] == 'system' %}{{ definitions }}{% endif %}"
    r"{% if message['tool_calls'] %}"
    r"{{ '<tool_call>' + (message['tool_calls'] | tojson) + '</tool_call>' }}"
    r"{% endif %}"
    r"{{ '<|im_end|>\n' }}"
    r"{% endfor %}"
    r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
