"""Actors: one mailbox, one message at a time, and a supervisor that restarts what crashes.

    message      what actors say, and the ways in which an ask can fail
    mailbox      the bounded queue of an actor, and the references that write to it
    actor        the loop that reads it
    stream       many values for one request, with an end
    restart      when to restart and when to give up
    supervisor   start in order, stop in reverse, restart what leans on a crash

The promise that the rest is built on: every ask ends exactly once, with an answer, a refusal or
``ActorGone``. Nothing here knows what the actors are for.
"""
