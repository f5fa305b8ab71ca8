"""Environment variables: who a process is, where its run and host are, and the run's settings.

Variables are read in this package only.
"""

from maniple.environment.environment import JOIN_DEADLINE_S as JOIN_DEADLINE_S
from maniple.environment.environment import THREAD_VARIABLES as THREAD_VARIABLES
from maniple.environment.environment import Environment as Environment
from maniple.environment.environment import check_not_inherited as check_not_inherited
from maniple.environment.environment import inherited_variables as inherited_variables
from maniple.environment.environment import mark_joined as mark_joined
from maniple.environment.environment import options_from_variables as options_from_variables
from maniple.environment.environment import override_environment as override_environment
from maniple.environment.environment import own_variables as own_variables
from maniple.environment.environment import personal_settings as personal_settings
from maniple.environment.environment import queue_task as queue_task
from maniple.environment.environment import read_environment as read_environment
from maniple.environment.environment import read_limits as read_limits
from maniple.environment.environment import read_threads as read_threads
from maniple.environment.environment import shared_memory as shared_memory
from maniple.environment.environment import variables_for as variables_for
from maniple.environment.environment import variables_not_inherited as variables_not_inherited
from maniple.environment.environment import variables_to_join as variables_to_join
