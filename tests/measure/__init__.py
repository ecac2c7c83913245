"""The instruments in ``course_utils/measure``: do they show what really happened?"""
